"""What the user chose, checked once; the rest of the converter trusts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from container.errors import UsageError
from container.layout import VQ3R, ExpertQuant


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
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers must be at least 1, found {self.workers}")
        if self.trunk_bits not in (4, 8):
            raise UsageError(f"--trunk-bits must be 4 or 8, found {self.trunk_bits}; 3-bit trunks collapse")
        if not 0 <= self.seed < 1 << 31:
            raise UsageError(f"--seed must be between 0 and {(1 << 31) - 1}, found {self.seed}")
        source, output = self.source.resolve(), self.output.resolve()
        if source == output or source in output.parents or output in source.parents:
            raise UsageError(f"SRC {source} and OUT {output} must not lie inside each other")

    @property
    def shaping(self) -> dict[str, object]:
        """The options that decide the container's bytes, under their command-line names."""
        return {"seed": self.seed, "trunk_bits": self.trunk_bits, "format": self.quant.fmt.name}


def parse_layers(text: str) -> frozenset[int]:
    """Layer numbers of a list like `1-10,12`. Raises UsageError."""
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UsageError(f"--layers: {part.strip()!r} is neither a layer number nor a range like 1-10")
        layers.update(range(int(first), int(last or first) + 1))
    return frozenset(layers)
