"""Everything that can stand against a conversion, checked before the first byte is written, in one list."""

from __future__ import annotations

from collections.abc import Container as Names
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from container.checkpoint import Checkpoint
from container.errors import ShardError, SourceError, shown
from container.machine import available_memory, free_disk
from container.model import KINDS
from container.progress import size
from convert.arch.base import Architecture
from convert.build import BuildFolder
from convert.device import CPU
from convert.encodings import ENCODINGS
from convert.encodings.base import Encoding
from convert.memory import worker_memory
from convert.options import ConvertOptions
from convert.plan import ConversionPlan, JobPlan
from convert.source import find_encoding

# A checkpoint of another shape misses every tensor; nobody reads, and no memory holds, a line for each.
MAX_PROBLEMS = 1000
# The manifest, the report, sidecars and the build folder's records; generous.
SMALL_FILES_BYTES = 64 << 20


@dataclass(frozen=True)
class Wanted:
    """A tensor the conversion reads."""

    name: str
    shape: tuple[int, ...]


def wanted_tensors(architecture: Architecture, job: JobPlan) -> Iterator[Wanted]:
    """Every tensor that a job reads, by its name in the checkpoint."""
    for item in job.trunk:
        yield Wanted(item.tensor.source, item.tensor.shape)
    if job.experts is not None:
        shapes = job.experts.layout.shapes
        for expert in range(job.experts.bank.n_experts):
            for kind in KINDS:
                yield Wanted(architecture.experts.source(job.experts.layer, expert, kind), shapes[kind])


@dataclass(frozen=True)
class SourceCheck:
    """What the names and shards of a checkpoint say about a conversion."""

    problems: tuple[str, ...]
    weight_maps: Mapping[str, Mapping[str, str]]  # job id -> part name -> shard


def check_source(checkpoint: Checkpoint, architecture: Architecture, jobs: Iterable[JobPlan]) -> SourceCheck:
    """Check that every tensor of `jobs` exists and, for shards that are there, that each can be read."""
    problems: list[str] = []
    readable: set[str] = set()
    for shard in filter(checkpoint.knows_shard, checkpoint.shard_names):
        try:
            checkpoint.shard(shard)
            readable.add(shard)
        except ShardError as error:
            problems.append(str(error))
    used: set[str] = set()
    weight_maps: dict[str, dict[str, str]] = {}
    for job in jobs:
        weight_map = weight_maps.setdefault(job.id, {})
        for wanted in wanted_tensors(architecture, job):
            try:
                encoding = find_encoding(wanted.name, checkpoint)
            except SourceError as error:
                problems.append(str(error))
                used.update(part for known in ENCODINGS for part in known.part_names(wanted.name))
                continue
            parts = encoding.part_names(wanted.name)
            weight_map.update((part, checkpoint.weight_map[part]) for part in parts)
            problems += _tensor_problems(checkpoint, wanted, encoding, readable)
        used.update(weight_map)
        if len(problems) >= MAX_PROBLEMS:
            problems.insert(0, f"stopped looking after {job.label}: is this config.json the one of these shards?")
            return SourceCheck(tuple(problems), weight_maps)
    problems += _unknown_tensors(checkpoint, architecture, used)
    return SourceCheck(tuple(problems), weight_maps)


def _tensor_problems(checkpoint: Checkpoint, wanted: Wanted, encoding: Encoding, readable: Names[str]) -> list[str]:
    """What is wrong with one tensor's parts; nothing is known of parts in shards that are not readable."""
    names = encoding.part_names(wanted.name)
    if not all(checkpoint.weight_map[name] in readable for name in names):
        return []
    try:
        return encoding.problems([checkpoint.entry(name) for name in names], wanted.shape)
    except ShardError as error:
        return [str(error)]


def _unknown_tensors(checkpoint: Checkpoint, architecture: Architecture, used: set[str]) -> list[str]:
    """Tensors the architecture does not know: leaving one out in silence could lose part of the model."""
    unknown = sorted(name for name in checkpoint.weight_map if name not in used)
    if not unknown:
        return []
    some = ", ".join(shown(name) for name in unknown[:3])
    more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
    return [f"tensors that are not part of {architecture.arch} as this program knows it: {some}{more}"]


def check_machine(
    options: ConvertOptions, plan: ConversionPlan, build: BuildFolder, n_workers: int, room_bytes: int
) -> list[str]:
    """Problems of the output folder, the disk (of which `room_bytes` must be free), the memory and the device."""
    problem = build.problem()
    problems = [] if problem is None else [problem]
    free = free_disk(options.output)
    if free < room_bytes:
        problems.append(f"disk: {size(room_bytes)} needed at {options.output}, {size(free)} free")
    needed, available = n_workers * worker_memory(plan, options.device), available_memory()
    if available is not None and needed > available:
        problems.append(
            f"memory: {n_workers} workers need {size(needed)}, {size(available)} available; use fewer --workers"
        )
    if options.device != CPU:
        # imported only now: the processor's path should not wait for torch to load
        from convert.torch_device import device_problems

        problems += device_problems(options.device, n_workers)
    return problems
