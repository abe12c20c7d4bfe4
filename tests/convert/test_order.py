"""The order of jobs and what it needs, held against slow simulations of a folder in which shards come and go."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.checkpoint import Checkpoint
from container.layout import VQ3R
from convert.arch import detect
from convert.order import Needs, held_after, job_order, least_staging, output_growth, shard_order
from convert.plan import plan_conversion, split_outside
from convert.preflight import check_source
from convert.source import shards_of
from tests.convert.test_dry_run import K3_DATA, needs_k3_data


@dataclass(frozen=True)
class Case:
    """Unfinished jobs, those of this run in any order, and what lies in the folder already."""

    needs: Needs
    wanted: list[str]
    held: frozenset[str]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Jobs that read any of a few shards, some none; some jobs may not be of this run, some shards nobody's.

    By a seed: drawn piece by piece, most examples had no job or no shard.
    """
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    names = [f"S{n}" for n in range(rng.randint(1, 6))]
    n_jobs = rng.choice((0, 1, 2, 4, 6, 8))
    jobs = {f"J{n}": frozenset(rng.choices(names, k=rng.choice((0, 1, 1, 1, 2, 2, 3)))) for n in range(n_jobs)}
    wanted = rng.sample(list(jobs), rng.choice((n_jobs, n_jobs, rng.randint(0, n_jobs))))
    held = frozenset(rng.sample(names, rng.randint(0, len(names))))
    return Case(Needs(jobs, {name: rng.randint(0, 50) for name in names}), wanted, held)


@st.composite
def contiguous(draw: st.DrawFn, n_most: int = 10) -> tuple[Needs, list[str]]:
    """A checkpoint as they are released, cut anywhere: (needs, jobs in the plan's order).

    Embedding, two parts of each layer, head: in this order, so that a layer lies in one shard or in two neighbours.
    """
    n_layers = draw(st.integers(1, n_most))
    parts = ["first", *(f"L{n}" for n in range(n_layers) for _ in range(2)), "last"]
    starts = [True, *draw(st.lists(st.booleans(), min_size=len(parts) - 1, max_size=len(parts) - 1))]
    shards = [f"S{n:02d}" for n in accumulate(starts)]
    where: dict[str, set[str]] = {}
    for part, shard in zip(parts, shards, strict=True):
        where.setdefault(part, set()).add(shard)
    if where["first"] == where["last"]:
        del where["last"]  # one job reads both
    plan = [name for name in ("first", "last") if name in where] + [f"L{n}" for n in range(n_layers)]
    sizes = {shard: draw(st.integers(1, 9)) for shard in shards}
    return Needs({job: frozenset(where[job]) for job in plan}, sizes), plan


def readers(needs: Needs, shard: str) -> set[str]:
    return {job for job, shards in needs.shards.items() if shard in shards}


class Folder:
    """A folder that a shard enters when a job asks for it and leaves when the last that reads it has ended."""

    def __init__(self, case: Case) -> None:
        self.needs = case.needs
        self.ended: set[str] = set()
        self.shards = sorted(case.held)
        self.sweep()

    def sweep(self) -> None:
        for shard in list(self.shards):
            if readers(self.needs, shard) <= self.ended:
                self.shards.remove(shard)

    def fetch(self, shards: Set[str]) -> None:
        for shard in sorted(shards):
            if shard not in self.shards:
                self.shards.append(shard)

    def end(self, job: str) -> None:
        self.ended.add(job)
        self.sweep()

    @property
    def n_bytes(self) -> int:
        return sum(self.needs.sizes[shard] for shard in self.shards)


def simulated(case: Case, order: Sequence[str]) -> list[tuple[str, frozenset[str]]]:
    folder, found = Folder(case), []
    for job in order:
        folder.fetch(case.needs.shards[job])
        found.append((job, frozenset(folder.shards)))
        folder.end(job)
    return found


@given(cases())
def test_every_job_has_its_turn_once(case):
    order = job_order(case.needs, case.wanted, case.held)
    assert sorted(order) == sorted(case.wanted)
    assert len(set(order)) == len(order)


@given(cases())
def test_the_order_follows_what_is_held(case):
    """At each turn no job is passed over that could have run without asking for more, or would have set more free."""
    order = job_order(case.needs, case.wanted, case.held)
    folder = Folder(case)
    for n, job in enumerate(order):
        here = set(folder.shards)
        left = sorted(order[n:], key=case.wanted.index)
        ready = [each for each in left if case.needs.shards[each] and case.needs.shards[each] <= here]
        reading_none = [each for each in left if not case.needs.shards[each]]
        sharing = [each for each in left if case.needs.shards[each] & here]
        assert job == (ready or reading_none or sharing or left)[0]
        folder.fetch(case.needs.shards[job])
        folder.end(job)


@given(cases())
def test_what_is_held_while_each_job_runs(case):
    order = job_order(case.needs, case.wanted, case.held)
    for each in (order, case.wanted):
        assert list(held_after(case.needs, each, case.held)) == simulated(case, each)


@given(cases())
def test_the_least_staging_is_just_enough(case):
    """With as much room every job runs; with a byte less the one that is named does not."""
    n_bytes, job = least_staging(case.needs, case.wanted, case.held)
    if not case.wanted:
        assert (n_bytes, job) == (0, "")
        return
    needed = {each: sum(case.needs.sizes[shard] for shard in shards) for each, shards in simulated(case, case.wanted)}
    assert max(needed.values()) == n_bytes == needed[job]
    assert all(needed[each] < n_bytes for each in case.wanted[: case.wanted.index(job)])


@given(cases())
def test_no_order_needs_less_than_its_largest_job(case):
    order = job_order(case.needs, case.wanted, case.held)
    n_bytes, _ = least_staging(case.needs, order, case.held)
    assert all(case.needs.n_bytes(case.needs.shards[job]) <= n_bytes for job in order)
    assert n_bytes <= sum(case.needs.sizes.values())
    if order:  # what others will need of what is here stays
        kept = {shard for shard in case.held if readers(case.needs, shard)}
        assert case.needs.n_bytes(kept) <= n_bytes


@given(cases())
def test_shards_are_fetched_in_the_order_of_use(case):
    found = shard_order(case.needs, case.wanted)
    asked = {shard for job in case.wanted for shard in case.needs.shards[job]}
    assert sorted(found) == sorted(asked)
    first = [min(n for n, job in enumerate(case.wanted) if shard in case.needs.shards[job]) for shard in found]
    assert first == sorted(first)
    for one, other in pairwise(zip(first, found, strict=True)):
        assert one < other  # several for one job: by name


@given(cases())
def test_all_shards_are_those_that_some_job_reads(case):
    assert case.needs.all_shards == {shard for shard in case.needs.sizes if readers(case.needs, shard)}


@given(contiguous())
def test_a_released_layout_needs_two_neighbours_at_most(layout):
    needs, plan = layout
    order = job_order(needs, plan, frozenset())
    for job, shards in held_after(needs, order, frozenset()):
        numbers = sorted(int(shard[1:]) for shard in shards)
        assert len(numbers) <= 2, (order, job)
        assert numbers in ([numbers[0]], [numbers[0], numbers[0] + 1])
    pairs = [needs.sizes[one] + needs.sizes[other] for one, other in pairwise(sorted(needs.sizes))]
    assert least_staging(needs, order, frozenset())[0] <= max(pairs, default=max(needs.sizes.values()))


@given(contiguous(), st.data())
def test_nor_does_it_where_some_jobs_are_finished(layout, data):
    """A resumed run, from an empty folder."""
    needs, plan = layout
    left = [job for job in plan if data.draw(st.booleans())]
    rest = Needs({job: needs.shards[job] for job in left}, needs.sizes)
    for _, shards in held_after(rest, job_order(rest, left, frozenset()), frozenset()):
        assert len(shards) <= 2


def test_by_hand():
    """Embedding and head in the first and the last shard, layer 1 in both of the first two."""
    shards = {"outside-1": "A", "outside-2": "C", "L0": "A", "L1": "AB", "L2": "B", "L3": "C"}
    needs = Needs({job: frozenset(each) for job, each in shards.items()}, {"A": 5, "B": 7, "C": 11})
    order = job_order(needs, list(shards), frozenset())
    assert order == ["outside-1", "L0", "L1", "L2", "outside-2", "L3"]
    assert [len(each) for _, each in held_after(needs, order, frozenset())] == [1, 1, 2, 1, 1, 1]
    assert least_staging(needs, order, frozenset()) == (12, "L1")
    assert shard_order(needs, order) == ["A", "B", "C"]
    # what is here already is used up first, and counts until then
    assert job_order(needs, list(shards), {"C"}) == ["outside-2", "L3", "outside-1", "L0", "L1", "L2"]
    assert least_staging(needs, order, {"C"}) == (23, "L1")
    # of a part of the jobs: A stays for the others
    assert least_staging(needs, ["L1", "L3"], frozenset()) == (23, "L3")


@needs_k3_data
def test_the_released_k3_needs_one_shard_at_a_time():
    """Every layer, and each part of what is outside them, lies in one shard."""
    checkpoint = Checkpoint.open(K3_DATA)
    plan = plan_conversion(detect(checkpoint.config), VQ3R, 4)
    plan = split_outside(plan, lambda tensor: shards_of(tensor, checkpoint))
    found = check_source(checkpoint, plan.architecture, plan.jobs).weight_maps
    needs = Needs(
        {job: frozenset(names.values()) for job, names in found.items()}, dict.fromkeys(checkpoint.shard_names, 1)
    )
    order = job_order(needs, [job.id for job in plan.jobs], frozenset())
    assert len(order) == len(shard_order(needs, order)) == 96
    assert least_staging(needs, order, frozenset())[0] == 1


@dataclass
class Disk:
    """A disk that holds source and output: each job's output counts from its start."""

    folder: Folder
    written: dict[str, int]
    n_bytes: int = 0

    def start(self, job: str) -> None:
        self.n_bytes += self.written[job]

    def end(self, job: str) -> None:
        before = self.folder.n_bytes
        self.folder.end(job)
        self.n_bytes -= before - self.folder.n_bytes


def filled(case: Case, written: dict[str, int], n_workers: int) -> int:
    """The most that a disk fills, when jobs end as they began and each worker is late to the last moment."""
    disk, most, running = Disk(Folder(case), written), 0, list[str]()
    for job in case.wanted:
        if len(running) == n_workers:
            disk.end(running.pop(0))
        disk.start(job)
        running.append(job)
        most = max(most, disk.n_bytes)
    return most


@st.composite
def outputs(draw: st.DrawFn) -> tuple[Case, dict[str, int]]:
    """A case, and what each of its jobs writes: sometimes about as much as its shards, and any of them the most."""
    case, rng = draw(cases()), random.Random(draw(st.integers(0, 1 << 32)))
    most = rng.choice((10, 50, 200))
    return case, {job: rng.randint(0, most) for job in case.needs.shards}


@given(outputs(), st.integers(1, 4))
def test_the_growth_of_a_disk_is_that_of_a_simulation(made, n_workers):
    case, written = made
    found = output_growth(case.needs, case.wanted, case.held, written, n_workers)
    used = frozenset(shard for shard in case.held if readers(case.needs, shard))
    assert output_growth(case.needs, case.wanted, used, written, n_workers) == filled(case, written, n_workers)
    assert found <= filled(case, written, n_workers)  # what nobody needs may go besides


@given(outputs(), st.integers(1, 4))
def test_the_growth_of_a_disk_has_bounds(made, n_workers):
    case, written = made
    total = sum(written[job] for job in case.wanted)
    nothing_goes = output_growth(case.needs, case.wanted, frozenset(), written, n_workers)
    found = output_growth(case.needs, case.wanted, case.held, written, n_workers)
    assert nothing_goes == total
    assert total - case.needs.n_bytes(case.held) <= found <= total
    assert max((written[job] for job in case.wanted[:1]), default=0) <= found
    assert found <= output_growth(case.needs, case.wanted, case.held, written, n_workers + 1)


@pytest.mark.parametrize(("n_workers", "expected"), [(1, 10), (2, 20), (3, 33), (4, 33)])
def test_growth_by_hand(n_workers, expected):
    """Two layers in each shard, which goes when both have ended: before L2 starts, before L3 or never in time."""
    shards = {"L0": "A", "L1": "A", "L2": "B", "L3": "B"}
    needs = Needs({job: frozenset(each) for job, each in shards.items()}, {"A": 30, "B": 30})
    written = {"L0": 4, "L1": 6, "L2": 10, "L3": 13}
    assert output_growth(needs, list(shards), {"A", "B"}, written, n_workers) == expected
