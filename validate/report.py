"""What a validation found: typed results, and the JSON object of `--json`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

# A damaged disk can give a problem per record; the count is exact, the list is for reading.
MAX_LISTED = 100
N_WORST = 10


@dataclass
class Findings:
    """Problems (each makes the validation fail) and notes (worth knowing); both lists are cut at `MAX_LISTED`."""

    n_problems: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True without problems."""
        return not self.n_problems

    def problem(self, text: str) -> None:
        """Something is wrong."""
        self.n_problems += 1
        if len(self.problems) < MAX_LISTED:
            self.problems.append(text)

    def note(self, text: str) -> None:
        """Something is unusual, but no fault."""
        if len(self.notes) < MAX_LISTED:
            self.notes.append(text)

    def merge(self, other: Findings) -> None:
        """Take over what `other` holds, behind what is here."""
        room = MAX_LISTED - len(self.problems)
        self.problems += other.problems[:room]
        self.n_problems += other.n_problems
        self.notes += other.notes[: MAX_LISTED - len(self.notes)]


@dataclass(frozen=True, kw_only=True)
class StructureReport:
    """How much was read and found whole."""

    ok: bool
    n_files: int = 0
    n_records: int = 0
    n_codebooks: int = 0
    n_trunk_tensors: int = 0
    n_checksums: int = 0  # crc32 and sha256 compared
    bytes_read: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """‖w - w'‖ / ‖w‖ of one tensor, w being the checkpoint's; infinite when w is zero and w' is not."""

    name: str
    kind: str  # gate, up, down or trunk
    fmt: str
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class KindError:
    """All compared tensors of one expert kind or one trunk format taken together."""

    relative_error: float  # sqrt(Σ‖w - w'‖² / Σ‖w‖²)
    worst: float
    bound: float  # for each tensor
    n_tensors: int
    n_weights: int


@dataclass(frozen=True, kw_only=True)
class WeightsReport:
    """The container against the checkpoint."""

    ok: bool
    tensors: list[TensorError]
    kinds: dict[str, KindError]  # gate, up, down, then trunk formats
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All fields, and `relative_error` by kind for those who want nothing else."""
        by_kind = {kind: error.relative_error for kind, error in self.kinds.items()}
        return {**dataclasses.asdict(self), "relative_error": by_kind}

    @property
    def worst(self) -> list[TensorError]:
        """The tensors nearest to (or farthest above) their bounds, at most `N_WORST`, exact ones left out."""

        def strain(tensor: TensorError) -> float:
            bound = self.kinds[tensor.fmt if tensor.kind == "trunk" else tensor.kind].bound
            return tensor.relative_error / bound if bound and math.isfinite(tensor.relative_error) else math.inf

        inexact = [tensor for tensor in self.tensors if tensor.relative_error != 0]
        return sorted(inexact, key=strain, reverse=True)[:N_WORST]


@dataclass(frozen=True, kw_only=True)
class RouterLayer:
    """One layer of a `RouterReport`."""

    layer: int
    n_choices: int  # tokens times experts per token
    n_changed: int
    n_tokens_changed: int  # tokens with a changed choice


@dataclass(frozen=True, kw_only=True)
class RouterReport:
    """The source's choices of experts that change when the router as stored reads the source's hidden states."""

    n_choices: int
    n_changed: int
    n_tokens: int
    n_tokens_changed: int  # tokens with a changed choice in any layer
    layers: list[RouterLayer]


@dataclass(frozen=True, kw_only=True)
class PromptReport:
    """Runtime against reference on one prompt."""

    ids: list[int]
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class LogitsReport:
    """Runtime against reference over all prompts.

    A relative error is the largest, over all positions, of ‖a - b‖ / ‖b‖ of that position's vector, b being the
    reference's.
    """

    ok: bool
    tolerance: float
    relative_error: float  # of the final logits, the worse of the runtime's two forms
    chunks_error: float | None  # of prompts taken in chunks; None where all have one token
    token_by_token_error: float  # of the same prompts, token by token
    per_layer: list[float]  # of the residual stream after each layer
    argmax_equal: bool  # at every position
    top10_equal: float  # share of positions whose ten likeliest tokens are the same set
    routing_equal: bool  # same experts chosen everywhere
    kl: float | None  # original ‖ converted, mean over positions, nats; None without the checkpoint
    top1_agreement: float | None  # share of positions where original and converted prefer the same token
    router: RouterReport | None  # None without the checkpoint
    prompts: list[PromptReport]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over all positions, and the ends of its interval by `validate.bootstrap` (None: a single window)."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class PositionBin:
    """Means over the positions `first` to `last` (0-based, inclusive) of every window."""

    first: int
    last: int
    n_positions: int
    kl: float
    top1_agreement: float


@dataclass(frozen=True, kw_only=True)
class TextFigures:
    """What a converted model says to a text, against its original. Every window begins with an empty state."""

    n_windows: int
    n_positions: int  # predicted tokens: all but the text's first
    perplexity_source: float  # exp of the mean of -log p(true next token)
    perplexity_container: float
    perplexity_ratio: float  # container / source
    log_perplexity_difference: Estimate  # the logarithm of that ratio
    kl: Estimate  # source ‖ container, nats
    top1_agreement: Estimate  # share of positions where both prefer the same token
    confidence: float  # of the intervals
    n_resamples: int
    bins: list[PositionBin]
    kl_by_position: list[float]  # mean over the windows, by position in the window
    top1_agreement_by_position: list[float]


@dataclass(frozen=True, kw_only=True)
class TextReport:
    """Container against source on a text."""

    ok: bool
    file: str
    n_tokens: int
    window: int  # tokens; the last window may be shorter
    figures: TextFigures
    router: RouterReport
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All fields, those of the figures beside the others."""
        raw = dataclasses.asdict(self)
        figures = raw.pop("figures")
        return {**raw, **figures}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything; `weights`, `logits` and `text` are None when not run."""

    container: str
    structure: StructureReport
    weights: WeightsReport | None
    logits: LogitsReport | None
    text: TextReport | None
    findings: Findings

    @property
    def ok(self) -> bool:
        """True when every check that ran holds."""
        return self.findings.ok

    def to_json(self) -> dict[str, Any]:
        """The object of `--json`. Numbers that JSON cannot hold (NaN, infinity) become null."""
        raw = {
            "ok": self.ok,
            "container": self.container,
            "structure": dataclasses.asdict(self.structure),
            "weights": None if self.weights is None else self.weights.to_json(),
            "logits": None if self.logits is None else dataclasses.asdict(self.logits),
            "text": None if self.text is None else self.text.to_json(),
            "n_problems": self.findings.n_problems,
            "problems": self.findings.problems,
            "notes": self.findings.notes,
        }
        finite: dict[str, Any] = _finite(raw)
        return finite


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value
