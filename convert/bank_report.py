"""What encoding one bank tells about itself: errors by kind, expert and row, and how often each entry is chosen.

The collector is fed in a fixed order, so that equal banks give equal figures whatever the threads. The figures
travel in the job's record, and are checked when they come back from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from container.json_object import is_count
from container.layout import VEC_DIM
from container.model import KINDS
from convert.encode import EncodedRows
from convert.plan import LayerExperts
from convert.relative_error import RelativeError

# Beside the kinds: all of a layer's experts together.
EXPERTS = "experts"
# Rows named for having the largest errors of the layer.
WORST_ROWS = 10
# Of 0.2 percentage points; the last one takes everything from 99.8 % on.
ROW_ERROR_BINS = 500
# Of errors of which there are many: a fifth digit is noise already, and 250,000 of them are to be read.
SIGNIFICANT_DIGITS = 5


@dataclass(frozen=True)
class WorstRow:
    """A row of one expert's matrix that its codes fit badly."""

    expert: int
    kind: str
    row: int
    error: float  # ‖w - w'‖ / ‖w‖ of the row
    rms: float  # of its weights: a bad row of small weights does little harm


@dataclass(frozen=True, kw_only=True)
class BankFigures:
    """One bank's figures. Errors are relative, ‖w - w'‖ / ‖w‖."""

    errors: Mapping[str, float]  # by kind, and EXPERTS for all of them
    expert_errors: Mapping[str, Sequence[float]]  # kind -> [n_experts]
    worst_rows: Sequence[WorstRow]  # the worst first
    row_errors: Mapping[str, Sequence[int]]  # kind -> rows in each of ROW_ERROR_BINS bins
    usage: Mapping[str, Sequence[Sequence[int]]]  # kind -> [stages][entries], how often each entry is chosen

    def to_json(self) -> dict[str, Any]:
        """For a job's record."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Any, experts: LayerExperts) -> BankFigures:
        """The figures of `experts` as `to_json` wrote them, keys in any order.

        Raises KeyError, TypeError or ValueError for anything else.
        """
        figures = cls(
            errors={key: raw["errors"][key] for key in (*KINDS, EXPERTS)},
            expert_errors={kind: raw["expert_errors"][kind] for kind in KINDS},
            worst_rows=[WorstRow(**row) for row in raw["worst_rows"]],
            row_errors={kind: raw["row_errors"][kind] for kind in KINDS},
            usage={kind: raw["usage"][kind] for kind in KINDS},
        )
        if figures.to_json() != raw or not figures._fit(experts):
            raise ValueError(f"not the figures of layer {experts.layer}")
        return figures

    def _fit(self, experts: LayerExperts) -> bool:
        """True when every number can be one of `experts`: kind, range, and what counts must add up to."""
        return (
            all(map(_is_error, self.errors.values()))
            and all(self._fits(kind, experts) for kind in KINDS)
            and len(self.worst_rows) == min(WORST_ROWS, sum(map(sum, self.row_errors.values())))
            and all(_is_row(row, experts) for row in self.worst_rows)
        )

    def _fits(self, kind: str, experts: LayerExperts) -> bool:
        n_experts, quant = experts.bank.n_experts, experts.layout.quant
        rows, cols = experts.layout.shapes[kind]
        errors, usage = self.expert_errors[kind], self.usage[kind]
        return (
            len(errors) == n_experts
            and all(map(_is_error, errors))
            and _counts(self.row_errors[kind], ROW_ERROR_BINS, n_experts * rows)
            and len(usage) == quant.n_stages
            and all(_counts(stage, quant.n_entries, n_experts * rows * cols // VEC_DIM) for stage in usage)
        )


class BankReport:
    """Collects the figures of one bank while it is being encoded."""

    def __init__(self, experts: LayerExperts) -> None:
        quant = experts.layout.quant
        self._shapes = experts.layout.shapes
        self._errors = {kind: RelativeError() for kind in KINDS}
        self._expert_errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._worst_rows: list[WorstRow] = []
        self._row_errors = {kind: np.zeros(ROW_ERROR_BINS, dtype=np.int64) for kind in KINDS}
        self._usage = {kind: np.zeros((quant.n_stages, quant.n_entries), dtype=np.int64) for kind in KINDS}

    def add(self, expert: int, kind: str, strips: Sequence[EncodedRows]) -> None:
        """Take in one matrix, its strips in order. Call by expert, then kind, both in order."""
        squared_errors = np.concatenate([strip.squared_errors for strip in strips])
        squared_norms = np.concatenate([strip.squared_norms for strip in strips])
        matrix = RelativeError(float(squared_errors.sum()), float(squared_norms.sum()))
        self._errors[kind].add(matrix.squared_error, matrix.squared_norm)
        self._expert_errors[kind].append(rounded(matrix.value))
        for strip in strips:
            self._usage[kind] += strip.usage
        ratios = np.divide(squared_errors, squared_norms, out=np.zeros_like(squared_errors), where=squared_norms > 0)
        errors = np.sqrt(ratios)
        bins = np.minimum(errors * ROW_ERROR_BINS, ROW_ERROR_BINS - 1).astype(np.int64)
        self._row_errors[kind] += np.bincount(bins, minlength=ROW_ERROR_BINS)
        self._note_worst(expert, kind, errors, np.sqrt(squared_norms / self._shapes[kind][1]))

    def _note_worst(
        self, expert: int, kind: str, errors: npt.NDArray[np.float64], rms: npt.NDArray[np.float64]
    ) -> None:
        """Keep the worst rows so far; of equal ones those that came first, since both sorts are stable."""
        rows = np.argsort(-errors, kind="stable")[:WORST_ROWS]
        self._worst_rows += [WorstRow(expert, kind, int(row), float(errors[row]), float(rms[row])) for row in rows]
        self._worst_rows.sort(key=lambda row: -row.error)
        del self._worst_rows[WORST_ROWS:]

    def figures(self) -> BankFigures:
        """What was collected."""
        total = RelativeError()
        for error in self._errors.values():
            total.add(error.squared_error, error.squared_norm)
        return BankFigures(
            errors={kind: self._errors[kind].value for kind in KINDS} | {EXPERTS: total.value},
            expert_errors=self._expert_errors,
            worst_rows=[
                WorstRow(row.expert, row.kind, row.row, rounded(row.error), rounded(row.rms))
                for row in self._worst_rows
            ],
            row_errors={kind: counts.tolist() for kind, counts in self._row_errors.items()},
            usage={kind: counts.tolist() for kind, counts in self._usage.items()},
        )


def rounded(value: float) -> float:
    """`value` to SIGNIFICANT_DIGITS digits."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _is_error(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and value >= 0


def _counts(values: Sequence[Any], n_values: int, total: int) -> bool:
    return len(values) == n_values and all(map(is_count, values)) and sum(values) == total


def _is_row(row: WorstRow, experts: LayerExperts) -> bool:
    """Raises KeyError for an unknown kind."""
    return (
        is_count(row.expert, most=experts.bank.n_experts - 1)
        and is_count(row.row, most=experts.layout.shapes[row.kind][0] - 1)
        and _is_error(row.error)
        and _is_error(row.rms)
    )
