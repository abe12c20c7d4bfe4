"""Every weight of a container against the checkpoint it was made of, both sides decoded by `validate.reference`.

The error of a tensor is ‖w - w'‖ / ‖w‖ over all its weights, w being the checkpoint's. Each must stay below the bound
of its format; a wrong matrix (gate and up swapped, rows permuted, another expert's) lies above 100 %.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TextIO

import numpy as np
import torch
from torch import Tensor

from container.checkpoint import Checkpoint
from container.errors import CheckError, MoedockError
from container.layout import ExpertFormat, TrunkFormat
from container.machine import available_cores
from container.manifest import TrunkEntry
from container.model import KINDS
from container.progress import ProgressReport
from container.reader import ContainerReader
from validate.pairing import expert_name, pair_tensors, plain_name, source_shape
from validate.reference.sources import CheckpointTensors, ContainerTensors
from validate.report import Findings, KindError, TensorError, WeightsReport

# Largest relative error of one tensor. F32 holds bf16, f16 and f32 as they are.
EXACT = 0.0
# Gaussian weights give 9.7 % at 4 bits and 0.61 % at 8 bits with searched group scales, 11.8 % and 0.65 % with amax / 7
# and amax / 127, as other writers have them. Outliers lengthen the steps: the worst tensor known, wqkv of K3's vision
# tower, has 17.9 % at 4 bits by amax / 7, which would be 1.0 % at 8. Truncating instead of rounding doubles the error:
# 23.5 % at 4 bits by amax / 7 is refused.
Q4G_BOUND = 0.22
Q8G_BOUND = 0.02
# Three greedy stages of 256 × 8 reach about 19 % on Gaussian weights and 20 % on K3 (3 bits per weight cannot end below
# 12.5 %); two stages reach about 33 %.
VQ_3_BIT_BOUND = 0.25
VQ_2_BIT_BOUND = 0.40
TRUNK_BOUNDS = {TrunkFormat.F32: EXACT, TrunkFormat.Q8G: Q8G_BOUND, TrunkFormat.Q4G: Q4G_BOUND}
EXPERT_BOUNDS = {
    ExpertFormat.VQ3R: VQ_3_BIT_BOUND,
    ExpertFormat.VQ4P: VQ_3_BIT_BOUND,
    ExpertFormat.VQ2R: VQ_2_BIT_BOUND,
}

# A strip's f32 copy has 8 MB; a handful of temporaries of this size exist per thread.
STRIP_WEIGHTS = 1 << 21
MAX_THREADS = 4  # each holds a few copies of an expert matrix

LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


@dataclass
class Sums:
    """Squared error and squared norm of some tensors."""

    error: float = 0.0
    norm: float = 0.0
    n_weights: int = 0

    def add(self, other: Sums) -> None:
        """Take the tensors of `other` in."""
        self.error += other.error
        self.norm += other.norm
        self.n_weights += other.n_weights

    @property
    def relative_error(self) -> float:
        """sqrt(error / norm); where the norm is zero, 0 without an error and infinity with one."""
        if self.norm == 0:
            return 0.0 if self.error == 0 else math.inf
        return math.sqrt(self.error / self.norm)


@dataclass(frozen=True)
class _Item:
    """One tensor to compare, named without prefix. `entry` is None for an expert's matrix."""

    name: str
    kind: str  # gate, up, down or trunk
    fmt: str
    entry: TrunkEntry | None = None

    @property
    def group(self) -> str:
        """What its error is summed under."""
        return self.fmt if self.entry is not None else self.kind


@dataclass
class _Result:
    """Outcome of one task."""

    tensors: list[TensorError] = field(default_factory=list)
    groups: dict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))
    findings: Findings = field(default_factory=Findings)


def check_weights(
    reader: ContainerReader,
    checkpoint: Checkpoint,
    *,
    n_experts: int | None,
    n_threads: int | None,
    stream: TextIO,
) -> tuple[WeightsReport, Findings]:
    """Compare every trunk tensor, and all experts or `n_experts` of each layer. Progress goes to `stream`.

    What is wrong is in the findings. Raises SourceError when the checkpoint's index names no usable shard.
    """
    started = time.monotonic()
    findings = Findings()
    if n_experts is not None and n_experts < reader.model.moe.n_experts:
        findings.note(f"only {n_experts} of {reader.model.moe.n_experts} experts of each layer were compared")
    comparable = pair_tensors(reader, checkpoint, findings)
    bounds = _bounds(reader)
    with _one_torch_thread():
        comparison = _Comparison(reader, checkpoint, comparable, bounds)
        n_threads = n_threads or min(MAX_THREADS, available_cores())
        results = _run(comparison, _tasks(reader, n_experts), n_threads, stream)
    tensors: list[TensorError] = []
    sums: dict[str, Sums] = defaultdict(Sums)
    for result in results:
        tensors += result.tensors
        findings.merge(result.findings)
        for kind, own in result.groups.items():
            sums[kind].add(own)
    report = WeightsReport(
        ok=findings.ok,
        tensors=tensors,
        kinds=_by_kind(tensors, sums, bounds),
        seconds=time.monotonic() - started,
    )
    return report, findings


def evenly_spread(n_all: int, n_wanted: int | None) -> tuple[int, ...]:
    """`n_wanted` numbers below `n_all` at equal distances, the first and the last among them; None takes all."""
    if n_wanted is None or n_wanted >= n_all:
        return tuple(range(n_all))
    return tuple(sorted({round(n) for n in np.linspace(0, n_all - 1, n_wanted)}))


def difference(found: Tensor, expected: Tensor) -> Sums:
    """Sums of two tensors with the same number of weights, in f64, a strip at a time."""
    sums = Sums()
    flat, wanted = found.reshape(-1), expected.reshape(-1)
    for start in range(0, wanted.numel(), STRIP_WEIGHTS):
        a, b = (side[start : start + STRIP_WEIGHTS].double() for side in (flat, wanted))
        sums.add(Sums(float((a - b).square().sum()), float(b.square().sum()), b.numel()))
    return sums


@dataclass(frozen=True)
class _Comparison:
    """The two sides, the names that stand on both, and the bounds by group."""

    reader: ContainerReader
    checkpoint: Checkpoint
    comparable: frozenset[str]
    bounds: Mapping[str, float]

    def compare(self, items: list[_Item], result: _Result) -> Iterator[None]:
        """Compare the items one by one, yielding after each."""
        # a checkpoint and a container's caches belong to one thread; opening them again costs a shard header
        checkpoint = Checkpoint(self.checkpoint.folder, self.checkpoint.config, self.checkpoint.weight_map)
        ours, theirs = ContainerTensors(self.reader), CheckpointTensors(checkpoint)
        try:
            for item in items:
                if item.name in self.comparable:
                    try:
                        self._judge(item, _difference_of(ours, theirs, item), result)
                    except MoedockError as error:
                        result.findings.problem(f"tensor {item.name}: not compared: {error}")
                yield
        finally:
            checkpoint.close()

    def _judge(self, item: _Item, sums: Sums, result: _Result) -> None:
        error, bound = sums.relative_error, self.bounds[item.group]
        result.tensors.append(TensorError(name=item.name, kind=item.kind, fmt=item.fmt, relative_error=error))
        result.groups[item.group].add(sums)
        if not error <= bound:  # NaN too
            allowed = f"at most {bound:.0%}" if bound else "none"
            result.findings.problem(f"tensor {item.name}: {item.fmt}, relative error {error:.3%}, {allowed} allowed")


def _difference_of(ours: ContainerTensors, theirs: CheckpointTensors, item: _Item) -> Sums:
    """Raises CheckError when the shapes do not fit; FormatError, ShardError, WeightError as reading does."""
    shape = source_shape(theirs, item.name)
    if item.entry is None:
        found, expected = ours[item.name], theirs[item.name]
        _require_same_shape(tuple(found.shape), shape)
        return difference(found, expected)
    stored = item.entry.shape
    _require_same_shape(stored, shape)
    if len(stored) != 2 or stored[0] != shape[0]:
        return difference(ours[item.name], theirs[item.name])
    sums, strip_rows = Sums(), max(1, STRIP_WEIGHTS // stored[1])
    for start in range(0, stored[0], strip_rows):
        stop = min(start + strip_rows, stored[0])
        sums.add(difference(ours.rows(item.name, start, stop), theirs.rows(item.name, start, stop)))
    return sums


def _require_same_shape(stored: tuple[int, ...], source: tuple[int, ...]) -> None:
    """Equal but for dimensions of 1 (writers drop them), or a four-dimensional kernel flattened to a matrix."""
    flattened = (source[0], math.prod(source[1:])) if len(source) == 4 else source
    kept = [tuple(n for n in shape if n != 1) for shape in (stored, source, flattened)]
    if kept[0] not in kept[1:]:
        raise CheckError(f"shape {list(stored)} in the container, {list(source)} in the checkpoint")


def _bounds(reader: ContainerReader) -> dict[str, float]:
    """Bound by group: expert kinds, then trunk formats."""
    trunk = {fmt.name: bound for fmt, bound in TRUNK_BOUNDS.items()}
    return dict.fromkeys(KINDS, EXPERT_BOUNDS[reader.manifest.expert_quant.fmt]) | trunk


def _by_kind(tensors: list[TensorError], sums: Mapping[str, Sums], bounds: Mapping[str, float]) -> dict[str, KindError]:
    errors: dict[str, list[float]] = defaultdict(list)
    for tensor in tensors:
        errors[tensor.fmt if tensor.kind == "trunk" else tensor.kind].append(tensor.relative_error)
    return {
        group: KindError(
            relative_error=sums[group].relative_error,
            worst=max(errors[group]),
            bound=bound,
            n_tensors=len(errors[group]),
            n_weights=sums[group].n_weights,
        )
        for group, bound in bounds.items()
        if errors[group]
    }


def _tasks(reader: ContainerReader, n_experts: int | None) -> list[list[_Item]]:
    """One task for what is outside the layers, then one per layer: its trunk tensors, then its experts."""
    by_layer: dict[int, list[_Item]] = {layer: [] for layer in range(-1, reader.model.n_layers)}
    for entry in reader.manifest.trunk:
        name = plain_name(reader, entry.name)
        layer = LAYER_NAME.match(name)
        by_layer[int(layer[1]) if layer else -1].append(_Item(name, "trunk", entry.fmt.name, entry))
    fmt = reader.manifest.expert_quant.fmt.name
    for number, bank in reader.manifest.layers.items():
        for expert in evenly_spread(bank.n_experts, n_experts):
            by_layer[number] += [_Item(expert_name(number, expert, kind), kind, fmt) for kind in KINDS]
    return list(by_layer.values())


def _run(comparison: _Comparison, tasks: list[list[_Item]], n_threads: int, stream: TextIO) -> list[_Result]:
    """All tasks in threads. KeyboardInterrupt stops them and passes."""
    report = ProgressReport(stream, "comparing weights", [len(items) for items in tasks], unit="tensor")
    lock, stop = threading.Lock(), threading.Event()

    def carry_out(number: int) -> _Result:
        result = _Result()
        for n_done, _ in enumerate(comparison.compare(tasks[number], result), 1):
            if stop.is_set():
                break
            with lock:
                report.update(number, n_done / len(tasks[number]))
        return result

    try:
        with ThreadPoolExecutor(n_threads) as threads:
            try:
                return list(threads.map(carry_out, range(len(tasks))))
            except BaseException:
                stop.set()
                raise
    finally:
        report.close()


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The tasks are parallel already; torch's own threads would only fight with them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
