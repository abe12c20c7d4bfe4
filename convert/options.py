"""What the user chose, checked once; the rest of the converter trusts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from container.errors import UsageError, shown
from container.layout import VQ3R, ExpertQuant
from container.model import MAX_LAYERS
from convert.device import CPU, is_device, kind_of
from convert.quality import Quality


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """One conversion's options. `workers`, `layers` and `dry_run` may change between resumed runs."""

    source: Path
    output: Path
    workers: int | None = None  # None: as the machine allows
    layers: frozenset[int] | None = None  # None: all, and everything outside the layers
    seed: int = 0
    trunk_bits: int = 4
    quant: ExpertQuant = VQ3R
    quality: Quality = Quality.BALANCED
    device: str = CPU  # that searches the experts' codes
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers must be at least 1, found {self.workers}")
        if self.trunk_bits not in (4, 8):
            raise UsageError(f"--trunk-bits must be 4 or 8, found {self.trunk_bits}; 3-bit trunks collapse")
        if not 0 <= self.seed < 1 << 31:
            raise UsageError(f"--seed must be between 0 and {(1 << 31) - 1}, found {self.seed}")
        if self.layers is not None and not self.layers:
            raise UsageError("--layers names no layer")
        if not is_device(self.device):
            raise UsageError(f"--device must be cpu, cuda or cuda:N, found {shown(self.device)}")
        source, output = _resolved(self.source), _resolved(self.output)
        if source == output or source in output.parents or output in source.parents:
            raise UsageError(f"SRC {source} and OUT {output} must not lie inside each other")

    @property
    def shaping(self) -> dict[str, object]:
        """The options that decide the container's bytes, under their command-line names."""
        return {
            "seed": self.seed,
            "trunk_bits": self.trunk_bits,
            "format": self.quant.fmt.name,
            "quality": self.quality.value,
            "device": kind_of(self.device),
        }


def parse_layers(text: str) -> frozenset[int]:
    """Layer numbers of a list like `1-10,12`. Raises UsageError."""
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(map(_is_layer, numbers)) or int(numbers[1]) < int(numbers[0]):
            raise UsageError(f"--layers: {shown(part.strip())} is neither a layer number nor a range like 1-10")
        layers.update(range(int(numbers[0]), int(numbers[1]) + 1))
    return frozenset(layers)


def _is_layer(text: str) -> bool:
    """Digits, few enough that a mistyped range cannot fill the memory."""
    return text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_LAYERS))


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        raise UsageError(f"{path}: cannot be followed ({error})") from None
