"""What a validation found: typed results, the JSON object of `--json`, and the text for people."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from container.progress import duration, size

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
    relative_error: float  # of the final logits
    per_layer: list[float]  # of the residual stream after each layer
    argmax_equal: bool  # at every position
    top10_equal: float  # share of positions whose ten likeliest tokens are the same set
    routing_equal: bool  # same experts chosen everywhere
    kl: float | None  # original ‖ converted, mean over positions, nats; None without the checkpoint
    top1_agreement: float | None  # share of positions where original and converted prefer the same token
    prompts: list[PromptReport]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything; `weights` and `logits` are None when not run."""

    container: str
    structure: StructureReport
    weights: WeightsReport | None
    logits: LogitsReport | None
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
            "n_problems": self.findings.n_problems,
            "problems": self.findings.problems,
            "notes": self.findings.notes,
        }
        finite: dict[str, Any] = _finite(raw)
        return finite

    def to_text(self) -> str:
        """The report for people."""
        lines = _structure_lines(self.structure)
        if self.weights is not None:
            lines += _weights_lines(self.weights)
        if self.logits is not None:
            lines += _logits_lines(self.logits)
        lines += [f"note: {note}" for note in self.findings.notes]
        lines += [f"problem: {problem}" for problem in self.findings.problems]
        unlisted = self.findings.n_problems - len(self.findings.problems)
        if unlisted:
            lines.append(f"… and {unlisted} more")
        verdict = "all checks hold" if self.ok else f"{self.findings.n_problems} problem(s) found"
        return "\n".join([*lines, f"{self.container}: {verdict}"])


def _structure_lines(structure: StructureReport) -> list[str]:
    return [
        f"structure: {_verdict(structure.ok)}; {structure.n_files} files, {structure.n_records} expert records, "
        f"{structure.n_codebooks} codebooks, {structure.n_trunk_tensors} trunk tensors, {structure.n_checksums} "
        f"checksums; {size(structure.bytes_read)} read in {_seconds(structure.seconds)}"
    ]


def _weights_lines(weights: WeightsReport) -> list[str]:
    lines = [
        f"weights: {_verdict(weights.ok)}; {len(weights.tensors)} tensors compared with the checkpoint in "
        f"{_seconds(weights.seconds)}"
    ]
    if weights.kinds:
        lines.append(f"  {'':<6}{'tensors':>9}{'weights':>19}{'relative error':>17}{'worst':>10}{'bound':>9}")
    for kind, error in weights.kinds.items():
        lines.append(
            f"  {kind:<6}{error.n_tensors:>9}{error.n_weights:>19,}{error.relative_error:>17.3%}"
            f"{error.worst:>10.3%}{error.bound:>9.0%}"
        )
    lines += [f"  worst: {tensor.name} ({tensor.fmt}) {tensor.relative_error:.3%}" for tensor in weights.worst[:3]]
    return lines


def _logits_lines(logits: LogitsReport) -> list[str]:
    n_positions = sum(len(prompt.ids) for prompt in logits.prompts)
    layer = max(range(len(logits.per_layer)), key=logits.per_layer.__getitem__)
    lines = [
        f"logits: {_verdict(logits.ok)}; runtime against reference, {len(logits.prompts)} prompts, {n_positions} "
        f"positions, in {_seconds(logits.seconds)}",
        f"  relative error {logits.relative_error:.2e} (tolerance {logits.tolerance:.0e}); largest after a layer "
        f"{logits.per_layer[layer]:.2e} (layer {layer})",
        f"  argmax {'equal' if logits.argmax_equal else 'NOT equal'} at every position; top-10 sets equal at "
        f"{logits.top10_equal:.1%}; routing {'equal' if logits.routing_equal else 'NOT equal'}",
    ]
    if logits.kl is not None and logits.top1_agreement is not None:
        lines.append(
            f"  original against converted model: KL {logits.kl:.4f} nats per position, same first choice at "
            f"{logits.top1_agreement:.1%}"
        )
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def _verdict(ok: bool) -> str:
    return "ok" if ok else "FAILED"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value
