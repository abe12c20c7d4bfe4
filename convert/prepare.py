"""Everything that is known and checked before the first byte is written, and the dry run that shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TextIO

from container.errors import BuildError, UsageError
from container.machine import available_cores, available_memory, free_disk
from convert.arch import detect
from convert.build import BuildFolder
from convert.device import CPU, DEVICE_WORKERS, STREAMS
from convert.memory import worker_memory
from convert.options import ConvertOptions
from convert.order import Needs, job_order, output_growth
from convert.plan import ConversionPlan, JobPlan, plan_conversion, split_outside
from convert.preflight import SMALL_FILES_BYTES, SourceCheck, check_machine, check_source
from convert.provenance import provenance
from convert.sidecars import Sidecars, plan_sidecars
from convert.source import shards_of
from convert.supply import Supply, looked_at


@dataclass(frozen=True)
class Prepared:
    """Everything known before the first byte is written."""

    options: ConvertOptions
    supply: Supply
    plan: ConversionPlan
    sidecars: Sidecars
    check: SourceCheck
    jobs: tuple[JobPlan, ...]  # of this run
    n_workers: int
    cores: int

    def threads_per_worker(self, n_workers: int) -> int:
        """Threads each of `n_workers` processes may use; a GPU's streams need one each, which mostly waits."""
        return max(1 if self.options.device == CPU else STREAMS, self.cores // n_workers)

    def needs(self, jobs: Iterable[JobPlan]) -> Needs:
        """The shards that `jobs` read."""
        shards = {job.id: frozenset(self.check.weight_maps.get(job.id, {}).values()) for job in jobs}
        return Needs(shards, dict.fromkeys(self.supply.checkpoint.shard_names, 0) | dict(self.supply.shard_bytes))

    def unfinished(self, build: BuildFolder) -> list[JobPlan]:
        """Jobs without a record, those of other runs too."""
        return [] if build.is_complete else [job for job in self.plan.jobs if not build.record(job.id).exists()]

    def machine_problems(self, build: BuildFolder) -> list[str]:
        """What of this machine stands against the conversion."""
        return check_machine(self.options, self.plan, build, self.n_workers, self.room_bytes(build))

    def room_bytes(self, build: BuildFolder) -> int:
        """Bytes that must be free at the output, or will be by shards given back meanwhile."""
        present = build.bytes_present(self.plan)
        missing = self.plan.total_bytes + SMALL_FILES_BYTES - present
        jobs = self.unfinished(build)
        banks = {job.id: job.experts.bank.n_bytes if job.experts else 0 for job in jobs}
        needs, held = self.needs(jobs), self.supply.held
        order = job_order(needs, list(needs.shards), held)
        growth = missing - sum(banks.values()) + output_growth(needs, order, held, banks, self.n_workers)
        return self.supply.room(needs, missing, growth)


def prepare(options: ConvertOptions, supply: Supply) -> Prepared:
    """Read config and names, plan, and check the source. Raises SourceError; collects other problems."""
    checkpoint = supply.checkpoint
    plan = plan_conversion(detect(checkpoint.config), options.quant, options.trunk_bits)
    plan = split_outside(plan, lambda tensor: shards_of(tensor, checkpoint))
    n_layers = plan.architecture.model.n_layers
    unknown = sorted(layer for layer in options.layers or () if layer >= n_layers)
    if unknown:
        raise UsageError(f"--layers: the model has layers 0 to {n_layers - 1}, not {unknown[0]}")
    jobs = plan.selected(options.layers)
    cores = available_cores()
    prepared = Prepared(
        options,
        supply,
        plan,
        plan_sidecars(checkpoint.folder, plan.architecture),
        check_source(checkpoint, plan.architecture, plan.jobs),
        jobs,
        1,
        cores,
    )
    return replace(prepared, n_workers=min(options.workers or _default_workers(prepared), len(jobs)))


def _default_workers(prepared: Prepared) -> int:
    """One process per core, but no more than jobs that take long, nor than memory holds, nor than the supply has
    shards for; cores left become threads.

    On a GPU two: while one trains codebooks or packs its layer's trunk on the processor, the other's experts keep
    the GPU busy; more would only take its memory.
    """
    cores, device = prepared.cores, prepared.options.device
    n_long = sum(job.experts is not None for job in prepared.jobs)
    memory = available_memory()
    fits = cores if memory is None else memory // worker_memory(prepared.plan, device)
    supplied = prepared.supply.most_jobs(prepared.needs(prepared.jobs)) or cores
    return max(1, min(cores if device == CPU else DEVICE_WORKERS, n_long, fits, supplied))


def dry_run(options: ConvertOptions, stream: TextIO) -> dict[str, Any]:
    """The plan as data, with every problem found; writes nothing.

    A checkpoint without any shard is planned from names and config alone; a checkpoint with some is incomplete.
    """
    with looked_at(options, stream) as supply:
        return _dry_run(prepare(options, supply), BuildFolder(options.output))


def _dry_run(prepared: Prepared, build: BuildFolder) -> dict[str, Any]:
    options, plan, supply = prepared.options, prepared.plan, prepared.supply
    needs = prepared.needs(prepared.unfinished(build))
    problems, notes = list(prepared.check.problems), [*prepared.sidecars.notes, *supply.notes(needs)]
    names_only = not any(map(supply.checkpoint.knows_shard, supply.checkpoint.shard_names))
    if names_only and not supply.fetches:
        notes += prepared.machine_problems(build)  # nothing can be converted yet: no problems of the plan
    else:
        problems += [*supply.problems(needs), *prepared.machine_problems(build)]
    if not problems and not names_only:
        problems += _other_build(prepared, build)
    absent = [shard for shard in supply.checkpoint.shard_names if not supply.here(shard)]
    return {
        "arch": plan.architecture.arch,
        "format": plan.quant.fmt.name,
        "layers": [job.layer for job in prepared.jobs if job.layer is not None],
        "moe_layers": len(plan.banks),
        "experts_per_layer": plan.architecture.model.moe.n_experts,
        "n_tensors": len(supply.checkpoint.weight_map),
        "n_weights": sum(job.n_weights for job in plan.jobs),
        "file_bytes": plan.file_bytes,
        "records_bytes": sum(bank.n_bytes for bank in plan.banks.values()),
        "total_bytes": plan.total_bytes,
        "workers": prepared.n_workers,
        "threads_per_worker": prepared.threads_per_worker(prepared.n_workers),
        "peak_memory_bytes": prepared.n_workers * worker_memory(plan, options.device),
        "room_bytes": prepared.room_bytes(build),
        "free_disk_bytes": free_disk(options.output),
        "shards_absent": len(absent),
        "names_only": names_only,
        "notes": notes,
        "problems": problems,
    }


def _other_build(prepared: Prepared, build: BuildFolder) -> list[str]:
    """Why the output folder belongs to another build, for a dry run."""
    supply = prepared.supply
    try:
        build.require_same(provenance(supply.checkpoint, prepared.options, supply.fingerprints))
    except BuildError as error:
        return [str(error)]
    return []
