"""A conversion from beginning to end: plan → check everything → work → assemble. Resumes by itself."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from container.errors import BuildError, PreflightError
from container.machine import free_disk
from container.manifest import Manifest
from container.progress import ProgressReport, size
from convert.assemble import assemble
from convert.bank_report import EXPERTS
from convert.build import BuildFolder, FinishedJob
from convert.feed import ShardFeed
from convert.jobs import JobInput, JobOutcome, convert_job, prove_job
from convert.options import ConvertOptions
from convert.order import Needs
from convert.plan import JobPlan
from convert.pool import Watcher, Work, run_work
from convert.prepare import Prepared, prepare
from convert.provenance import provenance
from convert.report import mean_error
from convert.supply import open_supply
from convert.timing import add_seconds
from convert.worker import Progress


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    complete: bool
    already_complete: bool
    n_jobs_done: int
    n_jobs_left: int
    n_weights: int  # encoded in this run
    elapsed_seconds: float
    step_seconds: Mapping[str, float]  # summed over threads
    peak_worker_bytes: int
    container_bytes: int
    relative_error: float | None  # of the experts converted so far
    notes: tuple[str, ...] = ()

    @property
    def weights_per_second(self) -> float:
        """Encoded weights by wall time."""
        return self.n_weights / self.elapsed_seconds if self.elapsed_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {**vars(self), "weights_per_second": self.weights_per_second}


def convert(options: ConvertOptions, stream: TextIO) -> Summary:
    """Convert, or go on where an earlier run stopped. `stream` gets progress and messages.

    Raises PreflightError with every problem; BusyError, MismatchError for the folder; WorkerError for a dead
    worker; SourceError for weights that cannot be used; BuildError for a full disk. KeyboardInterrupt passes.
    """
    started = time.monotonic()
    with open_supply(options, stream) as supply:
        return _convert(prepare(options, supply), BuildFolder(options.output), stream, started)


def _convert(prepared: Prepared, build: BuildFolder, stream: TextIO, started: float) -> Summary:
    options, supply = prepared.options, prepared.supply
    problems = [*prepared.check.problems, *supply.problems(prepared.needs(prepared.unfinished(build)))]
    if problems:
        # the few of the machine first: of a long list only the beginning is shown
        raise PreflightError([*prepared.machine_problems(build), *problems])
    identity = provenance(supply.checkpoint, options, supply.fingerprints)
    if not build.is_complete:
        problems = prepared.machine_problems(build)
        if problems:
            raise PreflightError(problems)
    try:
        if not build.is_complete:
            with build.locked():
                if not build.is_complete:  # the run that held the lock may just have finished
                    build.claim(identity)
                    build.reserve_trunk(prepared.plan.trunk_bytes)
                    return _build(prepared, build, identity, stream, started)
        return _already_complete(prepared, build, identity)
    except OSError as error:
        raise _disk_error(error, options) from error
    except MemoryError:
        raise BuildError(
            f"{options.output}: memory ran out; finished layers are kept, continue with fewer --workers"
        ) from None


def _build(
    prepared: Prepared, build: BuildFolder, identity: Mapping[str, Any], stream: TextIO, started: float
) -> Summary:
    records = _prove(prepared, build, stream)
    unfinished = [job for job in prepared.plan.jobs if job.id not in records]
    needs = prepared.needs(unfinished)
    problems = prepared.supply.problems(needs)
    if problems:  # a finished layer did not hold, and its shard is gone
        raise BuildError("\n".join(problems))
    todo = [job for job in unfinished if job in prepared.jobs]
    for job in todo:
        build.forget(job)
    outcomes = _work(prepared, todo, needs, stream)
    records |= {outcome.record.id: outcome.record for outcome in outcomes}
    left = len(prepared.plan.jobs) - len(records)
    if not left:
        stream.write("assembling the container\n")
        assemble(build, prepared.plan, records, prepared.sidecars, identity, prepared.supply.origin)
    step_seconds: dict[str, float] = {}
    for outcome in outcomes:
        add_seconds(step_seconds, outcome.record.seconds)
    return Summary(
        complete=not left,
        already_complete=False,
        n_jobs_done=len(todo),
        n_jobs_left=left,
        n_weights=sum(job.n_weights for job in todo),
        elapsed_seconds=time.monotonic() - started,
        step_seconds=step_seconds,
        peak_worker_bytes=max((outcome.peak_bytes for outcome in outcomes), default=0),
        container_bytes=prepared.plan.total_bytes,
        relative_error=mean_error(records),
        notes=prepared.sidecars.notes,
    )


def _prove(prepared: Prepared, build: BuildFolder, stream: TextIO) -> dict[str, FinishedJob]:
    """Records of earlier runs whose output still holds; of the others a word is said."""
    jobs = [job for job in prepared.plan.jobs if build.record(job.id).exists()]
    if not jobs:
        return {}
    records: dict[str, FinishedJob] = {}
    report = ProgressReport(stream, "proving finished layers", [1] * len(jobs), unit="job")
    report.say(f"{len(jobs)} of {len(prepared.plan.jobs)} jobs were finished before; proving them")

    def done(number: int, proof: FinishedJob | str) -> None:
        report.update(number, 1.0)
        if isinstance(proof, FinishedJob):
            records[proof.id] = proof
        else:
            report.say(f"{jobs[number].label}: {proof}; converting it again")

    try:
        run_work(
            Work(_prove_task, [(job, prepared.options.output) for job in jobs], [_proof_of(job) for job in jobs]),
            Watcher(done, lambda slots: None),
            n_workers=min(prepared.n_workers, len(jobs)),
        )
    finally:
        report.close()
    return records


def _prove_task(task: tuple[JobPlan, Path], progress: Progress) -> FinishedJob | str:
    return prove_job(*task)


def _proof_of(job: JobPlan) -> str:
    return f"the proof of {job.label}"


def _work(prepared: Prepared, todo: Sequence[JobPlan], needs: Needs, stream: TextIO) -> list[JobOutcome]:
    """Convert the jobs that are left, in worker processes. `needs`: of all unfinished jobs."""
    options, supply = prepared.options, prepared.supply
    order = supply.begin(needs, [job.id for job in todo])
    if not todo:
        stream.writelines(f"{line}\n" for line in supply.news())
        return []
    n_workers = min(prepared.n_workers, len(todo))
    tasks = [
        JobInput(
            plan=job,
            source=options.source,
            output=options.output,
            weight_map=prepared.check.weight_maps[job.id],
            expert_names=prepared.plan.architecture.experts,
            seed=options.seed,
            effort=options.quality.effort(options.quant),
            device=options.device,
            n_threads=prepared.threads_per_worker(n_workers),
            prove=supply.gives_back,
        )
        for job in todo
    ]
    n_experts = [job.experts.bank.n_experts if job.experts is not None else 1 for job in todo]
    report = ProgressReport(stream, "converting", [job.n_weights for job in todo], unit="weights")
    outcomes: list[JobOutcome] = []

    def done(number: int, outcome: JobOutcome) -> None:
        outcomes.append(outcome)
        report.update(number, 1.0)
        figures = outcome.record.experts
        error = f", relative error {100 * figures.errors[EXPERTS]:.2f} %" if figures else ""
        report.say(f"{todo[number].label}: done{error}")
        for line in supply.news():
            report.say(line)

    def tick(slots: Sequence[int]) -> None:
        for number, n_done in enumerate(slots):
            report.update(number, n_done / n_experts[number])
        for line in supply.news():
            report.say(line)

    feed = ShardFeed(supply, needs, order, {job.id: number for number, job in enumerate(todo)})
    try:
        run_work(
            Work(convert_job, tasks, [job.label for job in todo]),
            Watcher(done, tick),
            n_workers=n_workers,
            feed=feed,
        )
    finally:
        report.close()
    return outcomes


def _already_complete(prepared: Prepared, build: BuildFolder, identity: Mapping[str, Any]) -> Summary:
    """The container stands. Confirm that it is this one and that no file has lost bytes; clear a killed clean-up."""
    build.require_same(dict(identity))
    for name, entry in Manifest.read(build.output).files.items():
        path = build.output / name
        found = path.stat().st_size if path.is_file() else -1
        if found != entry.n_bytes:
            what = f"has {found} bytes, expected {entry.n_bytes}" if found >= 0 else "is missing"
            raise BuildError(f"{path} {what}: the finished container was damaged; convert into a new folder")
    if build.folder.exists():
        with build.locked():
            build.remove()
    notes, held = prepared.sidecars.notes, len(prepared.supply.held)
    if prepared.supply.gives_back and held:
        where = f"{prepared.options.source} still holds {held} shard(s)"
        notes = (*notes, f"{where}: {build.output} was complete before this run, so nothing was deleted")
    return Summary(True, True, 0, 0, 0, 0.0, {}, 0, prepared.plan.total_bytes, None, notes)


def _disk_error(error: OSError, options: ConvertOptions) -> BuildError:
    where = Path(error.filename or options.output)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildError(
            f"{where}: the disk is full ({size(free_disk(where))} free); finished layers are kept. Make room and run "
            "the same command to continue"
        )
    return BuildError(f"{where}: {error.strerror or error}; run the same command to continue")
