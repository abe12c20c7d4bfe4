"""Everything that is known and checked before the first byte is written, and the dry run that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from container.checkpoint import Checkpoint
from container.errors import BuildError, UsageError
from container.machine import available_cores, available_memory, free_disk
from convert.arch import detect
from convert.build import BuildFolder
from convert.device import CPU, DEVICE_WORKERS, STREAMS
from convert.memory import worker_memory
from convert.options import ConvertOptions
from convert.plan import ConversionPlan, JobPlan, plan_conversion
from convert.preflight import SourceCheck, check_machine, check_source
from convert.provenance import provenance
from convert.sidecars import Sidecars, plan_sidecars


@dataclass(frozen=True)
class Prepared:
    """Everything known before the first byte is written."""

    options: ConvertOptions
    checkpoint: Checkpoint
    plan: ConversionPlan
    sidecars: Sidecars
    source: SourceCheck
    jobs: tuple[JobPlan, ...]
    n_workers: int
    cores: int

    def threads_per_worker(self, n_workers: int) -> int:
        """Threads each of `n_workers` processes may use; a GPU's streams need one each, which mostly waits."""
        return max(1 if self.options.device == CPU else STREAMS, self.cores // n_workers)


def prepare(options: ConvertOptions) -> Prepared:
    """Read config and names, plan, and check the source. Raises SourceError; collects other problems."""
    checkpoint = Checkpoint.open(options.source)
    plan = plan_conversion(detect(checkpoint.config), options.quant, options.trunk_bits)
    n_layers = plan.architecture.model.n_layers
    unknown = sorted(layer for layer in options.layers or () if layer >= n_layers)
    if unknown:
        raise UsageError(f"--layers: the model has layers 0 to {n_layers - 1}, not {unknown[0]}")
    jobs = plan.selected(options.layers)
    cores = available_cores()
    n_workers = min(options.workers or _default_workers(plan, jobs, cores, options.device), len(jobs))
    return Prepared(
        options,
        checkpoint,
        plan,
        plan_sidecars(options.source, plan.architecture),
        check_source(checkpoint, plan.architecture, plan.jobs),
        jobs,
        n_workers,
        cores,
    )


def _default_workers(plan: ConversionPlan, jobs: tuple[JobPlan, ...], cores: int, device: str) -> int:
    """One process per core, but no more than jobs that take long, nor than memory holds; cores left become threads.

    On a GPU two: while one trains codebooks or packs its layer's trunk on the processor, the other's experts keep
    the GPU busy; more would only take its memory.
    """
    n_long = sum(job.experts is not None for job in jobs)
    memory = available_memory()
    fits = cores if memory is None else memory // worker_memory(plan, device)
    return max(1, min(cores if device == CPU else DEVICE_WORKERS, n_long, fits))


def dry_run(options: ConvertOptions) -> dict[str, Any]:
    """The plan as data, with every problem found; writes nothing.

    A checkpoint without any shard is planned from names and config alone; a checkpoint with some is incomplete.
    """
    prepared = prepare(options)
    plan, source = prepared.plan, prepared.source
    problems, notes = list(source.problems), list(prepared.sidecars.notes)
    machine = check_machine(options, plan, BuildFolder(options.output), prepared.n_workers)
    names_only = len(source.absent_shards) == len(prepared.checkpoint.shard_names)
    if names_only:
        notes += machine  # nothing can be converted yet, so this machine's limits do not count against the plan
    else:
        problems += absent_shards(prepared) + machine
    if not problems and not names_only:
        problems += _other_build(prepared)
    return {
        "arch": plan.architecture.arch,
        "format": plan.quant.fmt.name,
        "layers": [job.layer for job in prepared.jobs if job.layer is not None],
        "moe_layers": len(plan.banks),
        "experts_per_layer": plan.architecture.model.moe.n_experts,
        "n_tensors": len(prepared.checkpoint.weight_map),
        "n_weights": sum(job.n_weights for job in plan.jobs),
        "file_bytes": plan.file_bytes,
        "records_bytes": sum(bank.n_bytes for bank in plan.banks.values()),
        "total_bytes": plan.total_bytes,
        "workers": prepared.n_workers,
        "threads_per_worker": prepared.threads_per_worker(prepared.n_workers),
        "peak_memory_bytes": prepared.n_workers * worker_memory(plan, options.device),
        "free_disk_bytes": free_disk(options.output),
        "shards_absent": len(source.absent_shards),
        "names_only": names_only,
        "notes": notes,
        "problems": problems,
    }


def absent_shards(prepared: Prepared) -> list[str]:
    """A problem for every shard that is not there."""
    folder = prepared.options.source
    return [f"shard {folder / shard}: missing; download it" for shard in prepared.source.absent_shards]


def _other_build(prepared: Prepared) -> list[str]:
    """Why the output folder belongs to another build, for a dry run."""
    try:
        BuildFolder(prepared.options.output).require_same(provenance(prepared.checkpoint, prepared.options))
    except BuildError as error:
        return [str(error)]
    return []
