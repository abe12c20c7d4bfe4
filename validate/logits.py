"""The runtime against the PyTorch baseline on a container's own weights, and the converted model against the original.

Runtime and baseline read the same bytes, so they must agree to rounding. Original and converted model differ by
quantisation; that difference is measured (Kullback-Leibler divergence), not judged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from container.checkpoint import Checkpoint
from container.errors import MoedockError
from container.model import ModelConfig
from container.progress import ProgressReport
from container.reader import ContainerReader
from runtime.engine import Engine, Evaluation
from validate.reference.model import ReferenceOutput, forward
from validate.reference.sources import CheckpointTensors, ContainerTensors
from validate.report import Findings, LogitsReport, PromptReport, RouterReport
from validate.router import RouterCount

# One token, fewer tokens than a convolution window twice over, and enough for every kind of state to matter.
PROMPT_LENGTHS = (1, 7, 33)
PROMPT_SEED = 20
N_TOP = 10
# The baseline's own rounding in f32 is as large as the runtime's (4.5e-6 against 2.3e-6 on the small K3 of the tests),
# so it computes in f64: the error reported is the runtime's alone.
REFERENCE_DTYPE = torch.float64

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Compared:
    """One prompt of T tokens."""

    ids: list[int]
    logits_errors: Tensor  # [T]
    layer_errors: Tensor  # [layers, T]
    argmax_differs: list[int]  # positions
    n_top_equal: int  # positions
    routing_differs: list[tuple[int, int]]  # layer, position
    divergence: Tensor | None  # [T], nats
    n_top1_equal: int  # positions where original and converted agree


def check_logits(
    reader: ContainerReader,
    checkpoint: Checkpoint | None,
    *,
    tolerance: float,
    ids: Sequence[int] | None,
    stream: TextIO,
) -> tuple[LogitsReport, Findings]:
    """Run the prompt `ids`, or a few of our own, through both implementations. Progress goes to `stream`.

    Raises FormatError, CheckError or SourceError when a side cannot run; ids must lie in the vocabulary.
    """
    started = time.monotonic()
    prompts = default_prompts(reader.model.vocab_size) if ids is None else [list(ids)]
    findings = Findings()
    router = RouterCount(ContainerTensors(reader), reader.model)
    progress = ProgressReport(stream, "comparing logits", [len(prompt) for prompt in prompts], unit="token")
    compared = []
    try:
        with Engine.open(reader.folder) as engine:
            for number, prompt in enumerate(prompts):
                original = _original_logits(checkpoint, reader.model, prompt, router, findings)
                if original is None:
                    checkpoint = None  # its fault is known; further prompts would only repeat it
                compared.append(_compare(engine, reader, original, prompt))
                progress.update(number, 1.0)
    finally:
        progress.close()
    for one in compared:
        _judge(one, tolerance, findings)
    return _summary(compared, router.report(), tolerance, findings, time.monotonic() - started), findings


def default_prompts(vocab_size: int) -> list[list[int]]:
    """The prompts taken when none is given: the same for every model of this vocabulary."""
    rng = np.random.default_rng(PROMPT_SEED)
    return [rng.integers(vocab_size, size=n_tokens).tolist() for n_tokens in PROMPT_LENGTHS]


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """‖found - expected‖ / ‖expected‖ over the last dimension, in f64; two zero vectors are equal."""
    a, b = found.double(), expected.double()
    error, norm = (a - b).norm(dim=-1), b.norm(dim=-1)
    return torch.where(error == 0, error, error / norm)


def divergence(original: Tensor, converted: Tensor) -> Tensor:
    """Kullback-Leibler divergence of softmax(original) from softmax(converted) over the last dimension, in nats."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (original, converted))
    return (p.exp() * (p - q)).sum(-1)


def _original_logits(
    checkpoint: Checkpoint | None, model: ModelConfig, ids: list[int], router: RouterCount, findings: Findings
) -> Tensor | None:
    """The reference on the checkpoint, counted by `router`; None without one, and (a problem) where it cannot run."""
    if checkpoint is None:
        return None
    try:
        output = forward(CheckpointTensors(checkpoint), model, ids, dtype=REFERENCE_DTYPE)
    except MoedockError as error:
        findings.problem(f"logits of the original model: {error}")
        return None
    router.add(output)
    return output.logits


def _compare(engine: Engine, reader: ContainerReader, original: Tensor | None, ids: list[int]) -> _Compared:
    found = engine.evaluate(ids, trace=True)
    expected = forward(ContainerTensors(reader), reader.model, ids, dtype=REFERENCE_DTYPE)
    logits = torch.from_numpy(found.logits)
    layers = [
        relative_errors(torch.from_numpy(ours), theirs)
        for ours, theirs in zip(found.layers, expected.layers, strict=True)
    ]
    return _Compared(
        ids=ids,
        logits_errors=relative_errors(logits, expected.logits),
        layer_errors=torch.stack(layers),
        argmax_differs=(logits.argmax(-1) != expected.logits.argmax(-1)).nonzero().flatten().tolist(),
        n_top_equal=int((_top(logits) == _top(expected.logits)).all(-1).sum()),
        routing_differs=_routing_differences(found, expected),
        divergence=None if original is None else divergence(original, expected.logits),
        n_top1_equal=0 if original is None else int((original.argmax(-1) == expected.logits.argmax(-1)).sum()),
    )


def _top(logits: Tensor) -> Tensor:
    """Ids of the likeliest tokens in rising order: [T, N_TOP], or fewer of a tiny vocabulary."""
    return logits.topk(min(N_TOP, logits.shape[-1]), dim=-1).indices.sort(dim=-1).values


def _routing_differences(found: Evaluation, expected: ReferenceOutput) -> list[tuple[int, int]]:
    """(layer, position) of every token whose experts are not the reference's, in the order of computation."""
    different = []
    for layer, ids in sorted(expected.routing.items()):
        unequal = np.sort(found.routing[layer], axis=-1) != np.sort(ids.numpy(), axis=-1)
        different += [(layer, int(position)) for position in np.flatnonzero(unequal.any(axis=-1))]
    return different


def _judge(one: _Compared, tolerance: float, findings: Findings) -> None:
    """Problems of one prompt. A differing choice of experts comes first, since it explains the rest."""
    where = f"logits, prompt of {len(one.ids)} tokens"
    if one.routing_differs:
        layer, position = one.routing_differs[0]
        findings.problem(
            f"{where}: the runtime chose other experts than the reference in {len(one.routing_differs)} case(s), first "
            f"in layer {layer} at position {position}; a larger error behind it follows from that"
        )
    worst = float(one.logits_errors.max())
    if not worst <= tolerance:
        layer_worst = one.layer_errors.amax(dim=1)
        above = (~(layer_worst <= tolerance)).nonzero().flatten().tolist()
        begin = f"above it first after layer {above[0]}" if above else "within it after every layer"
        findings.problem(
            f"{where}: relative error {worst:.3e} at position {int(one.logits_errors.argmax())}, tolerance "
            f"{tolerance:.0e}; the residual stream is {begin}"
        )
    if one.argmax_differs:
        findings.problem(
            f"{where}: runtime and reference prefer different tokens at {len(one.argmax_differs)} position(s), first "
            f"at {one.argmax_differs[0]}"
        )


def _summary(
    compared: list[_Compared], router: RouterReport, tolerance: float, findings: Findings, seconds: float
) -> LogitsReport:
    n_positions = sum(len(one.ids) for one in compared)
    divergences = [one.divergence for one in compared if one.divergence is not None]
    return LogitsReport(
        ok=findings.ok,
        tolerance=tolerance,
        relative_error=float(torch.cat([one.logits_errors for one in compared]).max()),  # NaN stays NaN
        per_layer=torch.cat([one.layer_errors for one in compared], dim=1).amax(dim=1).tolist(),
        argmax_equal=not any(one.argmax_differs for one in compared),
        top10_equal=sum(one.n_top_equal for one in compared) / n_positions,
        routing_equal=not any(one.routing_differs for one in compared),
        kl=float(torch.cat(divergences).mean()) if divergences else None,
        top1_agreement=sum(one.n_top1_equal for one in compared) / n_positions if divergences else None,
        router=router if divergences else None,
        prompts=[PromptReport(ids=one.ids, relative_error=float(one.logits_errors.max())) for one in compared],
        seconds=seconds,
    )
