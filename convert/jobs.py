"""What one worker process does: convert one job, or prove a finished one. Runs in a spawned process."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from container.checkpoint import Checkpoint
from container.errors import BuildError
from container.machine import forget_cached, peak_memory
from container.manifest import FileEntry
from convert.arch.base import ExpertNames
from convert.build import BuildFolder, FinishedJob, publish_record
from convert.experts import BankJob
from convert.plan import JobPlan, LayerExperts, TrunkSlice
from convert.quality import Effort
from convert.source import SourceTensor
from convert.threads import worker_threads
from convert.timing import Timing
from convert.trunk import WrittenTensor, write_tensor
from convert.worker import Progress

PROOF_READ_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class JobInput:
    """A job with everything a worker needs to know; goes through a pipe."""

    plan: JobPlan
    source: Path
    output: Path
    weight_map: Mapping[str, str]  # of this job's tensor parts only
    expert_names: ExpertNames
    seed: int
    effort: Effort
    device: str
    n_threads: int
    prove: bool  # read the output back from the disk: its source will be deleted


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """What a worker reports back; only `record` is kept on disk."""

    record: FinishedJob
    peak_bytes: int  # the worker's peak resident memory so far


def convert_job(job: JobInput, progress: Progress) -> JobOutcome:
    """Write the job's trunk slices and bank, make them durable, then publish the job's record.

    Raises SourceError, WeightError for the source; OSError when the disk is full; BuildError when `prove` finds that
    the disk does not hold what was written.
    """
    checkpoint = Checkpoint(job.source, {}, dict(job.weight_map))
    build, timing = BuildFolder(job.output), Timing()
    threads = worker_threads(job.n_threads)
    try:
        trunk = _write_trunk(job, checkpoint, build, threads, timing)
        bank = codebooks = figures = None
        if job.plan.experts is not None:
            written = _bank_job(job, job.plan.experts, checkpoint, threads, timing).run(
                job.output / job.plan.experts.bank.file, build.codebooks(job.plan.id), progress
            )
            bank, codebooks, figures = written.bank, written.codebooks, written.figures
        record = FinishedJob(
            id=job.plan.id,
            bank=bank,
            codebooks=codebooks,
            trunk_crc32={name: written.crc32 for name, written in trunk.items()},
            trunk_errors={name: written.relative_error for name, written in trunk.items()},
            experts=figures,
            seconds=timing.seconds,
        )
        publish_record(build.record(job.plan.id), record)
        if job.prove:
            _require_proof(job)
    finally:
        threads.shutdown(cancel_futures=True)
        checkpoint.close()
    return JobOutcome(record=record, peak_bytes=peak_memory())


def _write_trunk(
    job: JobInput, checkpoint: Checkpoint, build: BuildFolder, threads: ThreadPoolExecutor, timing: Timing
) -> dict[str, WrittenTensor]:
    descriptor = os.open(build.trunk, os.O_WRONLY)
    try:
        written = {}
        for item in job.plan.trunk:
            source = SourceTensor.open(checkpoint, item.tensor.source, item.tensor.shape)
            written[item.entry.name] = write_tensor(source, item, descriptor, threads, timing)
        with timing.step("write"):
            os.fsync(descriptor)
        return written
    finally:
        os.close(descriptor)


def _bank_job(
    job: JobInput, experts: LayerExperts, checkpoint: Checkpoint, threads: ThreadPoolExecutor, timing: Timing
) -> BankJob:
    def open_matrix(expert: int, kind: str) -> SourceTensor:
        name = job.expert_names.source(experts.layer, expert, kind)
        return SourceTensor.open(checkpoint, name, experts.layout.shapes[kind])

    return BankJob(
        plan=experts,
        open_matrix=open_matrix,
        threads=threads,
        timing=timing,
        seed=job.seed,
        effort=job.effort,
        device=job.device,
    )


def _require_proof(job: JobInput) -> None:
    build = BuildFolder(job.output)
    proof = prove_job(job.plan, job.output)
    if not isinstance(proof, FinishedJob):
        build.record(job.plan.id).unlink()
        raise BuildError(f"{proof}, right after it was written: is the disk sound? Nothing was given back for it")


def prove_job(plan: JobPlan, output: Path) -> FinishedJob | str:
    """Compare a job's output, as the disk has it, with its record. Returns the record, or what does not hold."""
    build = BuildFolder(output)
    record = build.read_record(plan)
    if record is None:
        return f"{build.record(plan.id)} is damaged"
    for path, entry in (
        (output / plan.experts.bank.file if plan.experts else None, record.bank),
        (build.codebooks(plan.id), record.codebooks),
    ):
        if entry is None or path is None:
            continue
        if not path.is_file():
            return f"{path} is missing"
        forget_cached(path)
        if FileEntry.of_file(path) != entry:
            return f"{path} does not match its checksum"
    if not build.trunk.is_file():
        return f"{build.trunk} is missing"
    forget_cached(build.trunk)
    for item in plan.trunk:
        if _slice_crc(build.trunk, item) != record.trunk_crc32[item.entry.name]:
            return f"{build.trunk}: {item.entry.name} does not match its checksum"
    return record


def _slice_crc(path: Path, item: TrunkSlice) -> int:
    crc, left = 0, item.entry.n_bytes
    with path.open("rb") as file:
        file.seek(item.entry.offset)
        while left:
            piece = file.read(min(left, PROOF_READ_BYTES))
            if not piece:
                return -1
            crc = zlib.crc32(piece, crc)
            left -= len(piece)
    return crc
