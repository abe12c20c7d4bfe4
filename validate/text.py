"""What quantisation does to a model, measured on text: perplexity, divergence and first choices against the source.

The source runs in the PyTorch baseline, the container in the runtime, which takes a window in chunks, like a prompt.
Both begin every window with an empty state and carry nothing over, so the first positions of a window are predicted
from little and are hard for both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from container.checkpoint import Checkpoint
from container.progress import ProgressReport
from container.reader import ContainerReader
from validate.bootstrap import CONFIDENCE, F64, N_RESAMPLES, intervals
from validate.logits import divergence, open_engine
from validate.reference.model import forward
from validate.reference.sources import CheckpointTensors, ContainerTensors
from validate.reference.tensors import KeptTensors, TensorSource
from validate.report import Estimate, Findings, PositionBin, TextFigures, TextReport
from validate.router import RouterCount
from validate.tokens import cut

# Rounding makes a divergence of 4e-12 nats (f32 against f64, on the small K3 of the tests), quantisation one of 1e-3
# and more; f64 takes 1.4 times the time and twice the memory.
SOURCE_DTYPE = torch.float32
# Logits compared at once: the f64 copies take 32 MB each.
STRIP_LOGITS = 1 << 22
# Simulated with normal and log-normal windows, 95 % intervals hold the true mean in 92 to 95 % of cases with 30
# windows, in 89 to 90 % with 10, in 78 to 85 % with 5.
FEW_WINDOWS = 30


@dataclass(frozen=True)
class Scores:
    """One window of T positions."""

    kl: F64  # [T], nats
    loss_source: F64  # [T], -log p(true next token), nats
    loss_container: F64  # [T]
    agree: npt.NDArray[np.bool_]  # [T]: same first choice


def check_text(
    reader: ContainerReader,
    checkpoint: Checkpoint,
    ids: Sequence[int],
    *,
    file: Path,
    window: int,
    keep: bool,
    stream: TextIO,
) -> tuple[TextReport, Findings]:
    """Run the tokens `ids` of `file` through source and container in windows of `window`. Progress goes to `stream`.

    `keep` holds the decoded checkpoint in memory instead of reading it for every window. Raises FormatError, CheckError
    or SourceError when a side cannot run.
    """
    started = time.monotonic()
    source: TensorSource = CheckpointTensors(checkpoint)
    stored: TensorSource = ContainerTensors(reader)
    if keep:
        source, stored = KeptTensors(source), KeptTensors(stored)
    windows = cut(ids, window)
    router, scores = RouterCount(stored, reader.model), []
    progress = ProgressReport(stream, "comparing text", [len(each.ids) for each in windows], unit="token")
    try:
        with open_engine(reader, max(len(each.ids) for each in windows)) as engine:
            for number, each in enumerate(windows):
                original = forward(source, reader.model, each.ids, dtype=SOURCE_DTYPE)
                router.add(original)
                converted = torch.from_numpy(engine.evaluate(each.ids).logits)
                scores.append(score(original.logits, converted, each.targets))
                progress.update(number, 1.0)
    finally:
        progress.close()
    findings = _judge(scores)
    report = TextReport(
        ok=findings.ok,
        file=str(file),
        n_tokens=len(ids),
        window=window,
        figures=figures(scores),
        router=router.report(),
        seconds=time.monotonic() - started,
    )
    return report, findings


def score(original: Tensor, converted: Tensor, targets: Sequence[int]) -> Scores:
    """Compare two models' logits [T, V] at each position, `targets` being the true next tokens. All in f64."""
    strip = max(1, STRIP_LOGITS // original.shape[1])
    parts = [
        (
            divergence(ours, theirs),
            functional.cross_entropy(ours.double(), true, reduction="none"),
            functional.cross_entropy(theirs.double(), true, reduction="none"),
        )
        for ours, theirs, true in zip(
            *(torch.split(each, strip) for each in (original, converted, torch.tensor(targets))), strict=True
        )
    ]
    kl, loss_source, loss_container = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    return Scores(kl, loss_source, loss_container, (original.argmax(-1) == converted.argmax(-1)).numpy())


def figures(scores: Sequence[Scores]) -> TextFigures:
    """Means over all positions of all windows, with intervals over the windows, and means by position."""
    columns = [
        np.stack([one.kl, one.agree, one.loss_container - one.loss_source, one.loss_source], axis=1) for one in scores
    ]
    counts = np.array([len(column) for column in columns], dtype=np.float64)
    sums = np.stack([column.sum(axis=0) for column in columns])
    kl, agreement, difference, loss = sums.sum(axis=0) / counts.sum()
    ends = intervals(sums[:, :3], counts) if len(scores) > 1 else None
    kl_estimate, agreement_estimate, difference_estimate = (
        Estimate(value=float(value), low=_end(ends, number, 0), high=_end(ends, number, 1))
        for number, value in enumerate((kl, agreement, difference))
    )
    bins, by_position = _by_position(columns)
    with np.errstate(over="ignore"):  # a model that is certain and wrong: infinite is what it is
        perplexities = np.exp([loss, loss + difference, difference])
    return TextFigures(
        n_windows=len(scores),
        n_positions=int(counts.sum()),
        perplexity_source=float(perplexities[0]),
        perplexity_container=float(perplexities[1]),
        perplexity_ratio=float(perplexities[2]),
        log_perplexity_difference=difference_estimate,
        kl=kl_estimate,
        top1_agreement=agreement_estimate,
        confidence=CONFIDENCE,
        n_resamples=N_RESAMPLES,
        bins=bins,
        kl_by_position=by_position[:, 0].tolist(),
        top1_agreement_by_position=by_position[:, 1].tolist(),
    )


def _end(ends: F64 | None, number: int, side: int) -> float | None:
    return None if ends is None else float(ends[number, side])


def _by_position(columns: list[F64]) -> tuple[list[PositionBin], F64]:
    """Means of the first two columns over the windows: in bins that end before powers of two, and [positions, 2]."""
    n_positions = max(len(column) for column in columns)
    sums, counts = np.zeros((n_positions, 2)), np.zeros(n_positions)
    for column in columns:
        sums[: len(column)] += column[:, :2]
        counts[: len(column)] += 1
    edges = [0, *(1 << power for power in range(n_positions.bit_length()) if 1 << power < n_positions), n_positions]
    bins = []
    for first, end in pairwise(edges):
        n_in_bin = counts[first:end].sum()
        kl, agreement = sums[first:end].sum(axis=0) / n_in_bin
        bins.append(
            PositionBin(
                first=first, last=end - 1, n_positions=int(n_in_bin), kl=float(kl), top1_agreement=float(agreement)
            )
        )
    return bins, sums / counts[:, None]


def _judge(scores: list[Scores]) -> Findings:
    """The figures are measured, not judged; only logits that are no numbers are a problem."""
    findings = Findings()
    bad = [
        (number, int(position))
        for number, one in enumerate(scores)
        for position in np.flatnonzero(~np.isfinite(one.kl))
    ]
    if bad:
        window, position = bad[0]
        side = "source" if not np.isfinite(scores[window].loss_source[position]) else "container"
        findings.problem(
            f"text: NaN or infinite logits at {len(bad)} position(s), first at position {position} of window {window}, "
            f"of the {side}"
        )
    if len(scores) == 1:
        findings.note("text: a single window tells nothing about how windows differ, so there are no intervals")
    elif len(scores) < FEW_WINDOWS:
        findings.note(
            f"text: the intervals rest on {len(scores)} windows and are somewhat too narrow; a longer text, or a "
            "smaller --window, gives more"
        )
    return findings
