"""What a conversion will do and write, from names and config alone: pure arithmetic, no file is touched.

The plan fixes every byte position before the first byte is written, so that jobs can write their own slices of
trunk.bin in any order and in any process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from container.layout import (
    CODEBOOKS_NAME,
    MIN_QUANTISED_ELEMENTS,
    TRUNK_ALIGNMENT,
    TRUNK_NAME,
    ExpertQuant,
    TrunkFormat,
    align_up,
    bank_name,
)
from container.manifest import BankEntry, TrunkEntry
from container.records import CodebookRecord, RecordLayout
from container.trunk import trunk_size
from convert.arch.base import Architecture, Precision, TrunkTensor

OUTSIDE = "outside"  # id of the job for everything that is in no layer


@dataclass(frozen=True)
class TrunkSlice:
    """One trunk tensor's way from the checkpoint to its place in trunk.bin."""

    tensor: TrunkTensor
    entry: TrunkEntry


@dataclass(frozen=True)
class LayerExperts:
    """One layer's bank."""

    layer: int
    bank: BankEntry
    layout: RecordLayout


@dataclass(frozen=True)
class JobPlan:
    """One unit of work, done by one process and repeated whole after an interruption."""

    id: str  # "L12", OUTSIDE, or "outside-1" where that is split
    layer: int | None
    trunk: tuple[TrunkSlice, ...]
    experts: LayerExperts | None

    @property
    def label(self) -> str:
        """What messages call it."""
        if self.layer is not None:
            return f"layer {self.layer}"
        first, more = self.trunk[0].entry.name, len(self.trunk) - 1
        return f"{first} and {more} more outside the layers" if more else f"{first}, outside the layers"

    @property
    def n_weights(self) -> int:
        """Weights that this job encodes."""
        experts = self.experts
        routed = sum(math.prod(s) for s in experts.layout.shapes.values()) * experts.bank.n_experts if experts else 0
        return routed + sum(math.prod(item.tensor.shape) for item in self.trunk)


@dataclass(frozen=True)
class ConversionPlan:
    """All jobs of a conversion and the exact size of every large file."""

    architecture: Architecture
    quant: ExpertQuant
    jobs: tuple[JobPlan, ...]
    trunk_bytes: int

    @property
    def slices(self) -> tuple[TrunkSlice, ...]:
        """Trunk tensors in file order, whichever jobs write them."""
        return tuple(sorted((item for job in self.jobs for item in job.trunk), key=lambda item: item.entry.offset))

    @property
    def trunk(self) -> tuple[TrunkEntry, ...]:
        """Trunk entries in file order, without checksums."""
        return tuple(item.entry for item in self.slices)

    @property
    def banks(self) -> dict[int, BankEntry]:
        """Bank entries by layer."""
        return {job.experts.layer: job.experts.bank for job in self.jobs if job.experts}

    @property
    def codebooks_bytes(self) -> int:
        """Size of codebooks.bin."""
        return len(self.banks) * self.quant.n_codebooks * CodebookRecord.size(self.quant.n_entries)

    @property
    def file_bytes(self) -> dict[str, int]:
        """Exact size of every file but the manifest, the reports and the sidecars, which are small."""
        sizes = {bank.file: bank.n_bytes for bank in self.banks.values()}
        return {**sizes, TRUNK_NAME: self.trunk_bytes, CODEBOOKS_NAME: self.codebooks_bytes}

    @property
    def total_bytes(self) -> int:
        """Sum of `file_bytes`."""
        return sum(self.file_bytes.values())

    def selected(self, layers: frozenset[int] | None) -> tuple[JobPlan, ...]:
        """The jobs of `layers`; None selects all, the one outside the layers included."""
        if layers is None:
            return self.jobs
        return tuple(job for job in self.jobs if job.layer in layers)


def split_outside(plan: ConversionPlan, shards_of: Callable[[str], frozenset[str]]) -> ConversionPlan:
    """The plan with one job for each group of shards that tensors outside the layers lie in.

    The embedding is in a checkpoint's first shard, the head in its last: a single job would need both at once.
    `shards_of` gives the shards of a source tensor.
    """
    outside, *layers = plan.jobs
    groups: dict[frozenset[str], list[TrunkSlice]] = {}
    for item in outside.trunk:
        groups.setdefault(shards_of(item.tensor.source), []).append(item)
    jobs = [replace(outside, id=f"{OUTSIDE}-{n}", trunk=tuple(items)) for n, items in enumerate(groups.values(), 1)]
    return replace(plan, jobs=(*jobs, *layers))


def plan_conversion(architecture: Architecture, quant: ExpertQuant, trunk_bits: int) -> ConversionPlan:
    """The whole plan. Raises FormatError when an expert matrix cannot be cut into vectors."""
    slices, position = [], 0
    for tensor in architecture.trunk:
        entry = _trunk_entry(tensor, trunk_bits, position)
        slices.append(TrunkSlice(tensor, entry))
        position = align_up(entry.offset + entry.n_bytes, TRUNK_ALIGNMENT)
    trunk_bytes = slices[-1].entry.offset + slices[-1].entry.n_bytes
    model = architecture.model
    layout = RecordLayout(quant, model.expert_shapes)
    n_experts = model.moe.n_experts
    by_layer: dict[int | None, list[TrunkSlice]] = {None: [], **{layer: [] for layer in range(model.n_layers)}}
    for item in slices:
        by_layer[item.tensor.layer].append(item)
    jobs = [JobPlan(OUTSIDE, None, tuple(by_layer[None]), None)]
    for layer in range(model.n_layers):
        experts = None
        if model.is_moe(layer):
            bank = BankEntry(
                file=bank_name(layer),
                n_experts=n_experts,
                n_bytes=n_experts * layout.stride_bytes,
                codebook_base=model.moe_layers.index(layer) * quant.n_codebooks,
            )
            experts = LayerExperts(layer, bank, layout)
        jobs.append(JobPlan(f"L{layer}", layer, tuple(by_layer[layer]), experts))
    return ConversionPlan(architecture, quant, tuple(jobs), trunk_bytes)


def trunk_format(tensor: TrunkTensor, trunk_bits: int) -> TrunkFormat:
    """Format of a trunk tensor (docs/FORMAT.md): small and 1-D tensors stay F32, the rest by its precision."""
    shape = tensor.stored_shape
    if len(shape) == 1 or math.prod(shape) < MIN_QUANTISED_ELEMENTS:
        return TrunkFormat.F32
    if tensor.precision is Precision.HIGH or trunk_bits == 8:
        return TrunkFormat.Q8G
    return TrunkFormat.Q4G


def _trunk_entry(tensor: TrunkTensor, trunk_bits: int, offset: int) -> TrunkEntry:
    fmt = trunk_format(tensor, trunk_bits)
    size = trunk_size(tensor.stored_shape, fmt)
    entry = TrunkEntry(name=tensor.name, fmt=fmt, shape=tensor.stored_shape, offset=offset, n_bytes=size.total_bytes)
    if fmt is TrunkFormat.F32:
        return entry
    return replace(entry, scale_offset=offset + size.values_bytes)
