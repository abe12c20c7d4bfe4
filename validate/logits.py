"""The runtime against the PyTorch baseline on a container's own weights, and the converted model against the original.

Runtime and baseline read the same bytes, so they must agree to rounding, in both forms that the runtime has: a prompt
taken in chunks, and token by token. Original and converted model differ by quantisation; that difference is measured
(Kullback-Leibler divergence), not judged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from runtime.memory.planning import memory_plan
from runtime.options import RunOptions
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

CHUNKS, TOKEN_BY_TOKEN = "in chunks", "token by token"

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Form:
    """What the runtime makes of a prompt of T tokens in one of its forms, against the reference."""

    name: str
    logits_errors: Tensor  # [T]
    layer_errors: Tensor  # [layers, T]
    argmax_differs: list[int]  # positions
    top_equal: Tensor  # [T]
    routing_differs: list[tuple[int, int]]  # layer, position


@dataclass(frozen=True)
class _Compared:
    """One prompt of T tokens."""

    ids: list[int]
    forms: list[_Form]
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
        with open_engine(reader, max(map(len, prompts))) as engine:
            for number, prompt in enumerate(prompts):
                original = _original_logits(checkpoint, reader.model, prompt, router, findings)
                if original is None:
                    checkpoint = None  # its fault is known; further prompts would only repeat it
                compared.append(_compare(engine, reader, original, prompt))
                progress.update(number, 1.0)
    finally:
        progress.close()
    for one in compared:
        for form in one.forms:
            _judge(form, len(one.ids), tolerance, findings)
    return _summary(compared, router.report(), tolerance, findings, time.monotonic() - started), findings


def open_engine(reader: ContainerReader, context: int) -> Engine:
    """The runtime with room for `context` tokens, in as little memory as it takes: the reference needs the rest.

    Raises FormatError for an unusable container, MoedockError when the memory does not suffice.
    """
    options = RunOptions(context=context)
    return Engine.open(reader.folder, replace(options, budget_bytes=memory_plan(reader.folder, options).floor_bytes))


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
    expected = forward(ContainerTensors(reader), reader.model, ids, dtype=REFERENCE_DTYPE)
    forms = [_form(CHUNKS, engine.evaluate(ids, trace=True), expected)] if len(ids) > 1 else []
    forms.append(_form(TOKEN_BY_TOKEN, engine.evaluate(ids, trace=True, one_by_one=True), expected))
    return _Compared(
        ids=ids,
        forms=forms,
        divergence=None if original is None else divergence(original, expected.logits),
        n_top1_equal=0 if original is None else int((original.argmax(-1) == expected.logits.argmax(-1)).sum()),
    )


def _form(name: str, found: Evaluation, expected: ReferenceOutput) -> _Form:
    logits = torch.from_numpy(found.logits)
    layers = [
        relative_errors(torch.from_numpy(ours), theirs)
        for ours, theirs in zip(found.layers, expected.layers, strict=True)
    ]
    return _Form(
        name,
        logits_errors=relative_errors(logits, expected.logits),
        layer_errors=torch.stack(layers),
        argmax_differs=(logits.argmax(-1) != expected.logits.argmax(-1)).nonzero().flatten().tolist(),
        top_equal=(_top(logits) == _top(expected.logits)).all(-1),
        routing_differs=_routing_differences(found, expected),
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


def _judge(one: _Form, n_tokens: int, tolerance: float, findings: Findings) -> None:
    """Problems of one form. A differing choice of experts comes first, since it explains the rest."""
    where = f"logits, prompt of {n_tokens} tokens {one.name}"
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
    forms = [form for one in compared for form in one.forms]
    chunked = [form for form in forms if form.name == CHUNKS]
    n_top_equal = sum(int(torch.stack([form.top_equal for form in one.forms]).all(0).sum()) for one in compared)
    divergences = [one.divergence for one in compared if one.divergence is not None]
    return LogitsReport(
        ok=findings.ok,
        tolerance=tolerance,
        relative_error=_worst(forms),
        chunks_error=_worst(chunked) if chunked else None,
        token_by_token_error=_worst([form for form in forms if form.name == TOKEN_BY_TOKEN]),
        per_layer=torch.cat([form.layer_errors for form in forms], dim=1).amax(dim=1).tolist(),
        argmax_equal=not any(form.argmax_differs for form in forms),
        top10_equal=n_top_equal / n_positions,
        routing_equal=not any(form.routing_differs for form in forms),
        kl=float(torch.cat(divergences).mean()) if divergences else None,
        top1_agreement=sum(one.n_top1_equal for one in compared) / n_positions if divergences else None,
        router=router if divergences else None,
        prompts=[PromptReport(ids=one.ids, relative_error=_worst(one.forms)) for one in compared],
        seconds=seconds,
    )


def _worst(forms: list[_Form]) -> float:
    """The largest error of the logits, NaN where there is one."""
    return float(torch.cat([form.logits_errors for form in forms]).max())
