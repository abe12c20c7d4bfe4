"""The feed against a supply of which the test decides when a shard comes: who starts when, and what goes when."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import TransferError
from convert.feed import ShardFeed
from convert.order import Needs
from tests.convert.test_order import Case, cases, readers

SEEDS = st.integers(0, 1 << 32)


class FakeSupply:
    """Shards that come and go by hand."""

    def __init__(self, here: set[str]) -> None:
        self.now = here
        self.gone: list[str] = []
        self.ended: Exception | None = None

    def here(self, shard: str) -> bool:
        return shard in self.now

    def give_back(self, shard: str) -> None:
        assert shard in self.now
        self.now.remove(shard)
        self.gone.append(shard)

    def failure(self) -> Exception | None:
        return self.ended


class Run:
    """A feed in use, and what must be true of it at any time."""

    def __init__(self, case: Case, numbers: dict[str, int]) -> None:
        self.case = case
        self.ids = {number: job for job, number in numbers.items()}
        self.supply = FakeSupply(set(case.held))
        self.feed = ShardFeed(self.supply, case.needs, case.wanted, numbers)  # type: ignore[arg-type]
        self.started: list[str] = []
        self.running: list[int] = []
        self.finished: set[str] = set()

    @property
    def to_come(self) -> list[str]:
        return sorted(set(self.case.needs.sizes) - self.supply.now - set(self.supply.gone))

    @property
    def waiting(self) -> list[str]:
        return [job for job in self.case.wanted if job not in self.started]

    def take(self) -> bool:
        """Start what the feed gives: the first in the order whose shards are all here."""
        able = [job for job in self.waiting if self.case.needs.shards[job] <= self.supply.now]
        number = self.feed.take()
        assert (number is not None) == bool(able)
        if number is None:
            return False
        job = self.ids[number]
        assert job == able[0]
        self.started.append(job)
        self.running.append(number)
        return True

    def finish(self, number: int) -> None:
        """A job ends: what no job reads any more is given back just now, and nothing else."""
        gone_before = list(self.supply.gone)
        self.running.remove(number)
        self.finished.add(self.ids[number])
        self.feed.finished(number)
        shards = self.case.needs.shards[self.ids[number]]
        due = {shard for shard in shards if readers(self.case.needs, shard) <= self.finished}
        assert self.supply.gone[: len(gone_before)] == gone_before
        assert sorted(self.supply.gone[len(gone_before) :]) == sorted(due)


def run_with(case: Case, rng: random.Random) -> Run:
    numbers = rng.sample(range(len(case.wanted)), len(case.wanted))
    return Run(case, dict(zip(case.wanted, numbers, strict=True)))


def go_on(run: Run, rng: random.Random, n_workers: int) -> bool:
    """Something happens: a job starts or ends, or a shard comes. False when nothing more can."""
    may = []
    if len(run.running) < n_workers:
        may.append("take")
    if run.running:
        may.append("finish")
    if run.to_come and run.supply.ended is None:
        may.append("come")
    what = rng.choice(may)
    if what == "come":
        run.supply.now.add(rng.choice(run.to_come))
    elif what == "finish":
        run.finish(rng.choice(run.running))
    else:
        return run.take() or len(may) > 1
    return True


@given(cases(), st.integers(1, 3), SEEDS)
def test_every_job_runs_once_and_every_shard_goes_once(case, n_workers, seed):
    rng = random.Random(seed)
    run = run_with(case, rng)
    while go_on(run, rng, n_workers):
        pass
    assert run.started == list(dict.fromkeys(run.started))
    assert sorted(run.started) == sorted(run.case.wanted)
    assert run.feed.take() is None
    needs = run.case.needs
    # what jobs of other runs still read stays, and what nobody ever read is not the feed's
    done = {shard for shard in needs.sizes if readers(needs, shard) and readers(needs, shard) <= set(run.case.wanted)}
    assert sorted(run.supply.gone) == sorted(done)


@given(cases(), st.integers(1, 3), SEEDS)
def test_a_failure_waits_for_what_runs(case, n_workers, seed):
    """Jobs at work come to their end, jobs whose shards are here still start; then the failure is raised as it is."""
    rng = random.Random(seed)
    run = run_with(case, rng)
    for _ in range(rng.randint(0, 12)):
        if not go_on(run, rng, n_workers):
            break
    run.supply.ended = TransferError("the line is cut")
    while run.running:
        if len(run.running) == n_workers or not run.take():
            run.finish(rng.choice(run.running))
    while any(run.case.needs.shards[job] <= run.supply.now for job in run.waiting):
        assert run.take()
        run.finish(run.running[0])
    for _ in range(2):
        if run.waiting:
            with pytest.raises(TransferError) as caught:
                run.feed.take()
            assert caught.value is run.supply.ended
        else:
            assert run.feed.take() is None


def run_of(jobs: dict[str, str], here: str, wanted: str | None = None) -> Run:
    """Jobs and shards with names of one letter."""
    needs = Needs({job: frozenset(shards) for job, shards in jobs.items()}, dict.fromkeys("ABC", 1))
    order = list(wanted if wanted is not None else jobs)
    return Run(Case(needs, order, frozenset(here)), {job: 10 + n for n, job in enumerate(order)})


def test_by_hand():
    """x reads A, y reads A and B, z reads C: z need not wait for B."""
    run = run_of({"x": "A", "y": "AB", "z": "C"}, "A")
    assert run.feed.take() == 10
    assert run.feed.take() is None
    run.supply.now.add("C")
    assert run.feed.take() == 12
    run.feed.finished(10)
    assert run.supply.gone == []  # y still reads A
    run.supply.now.add("B")
    assert run.feed.take() == 11
    run.feed.finished(11)
    assert run.supply.gone == ["A", "B"]
    run.feed.finished(12)
    assert run.supply.gone == ["A", "B", "C"]
    assert run.feed.take() is None


def test_shards_of_a_later_run_stay():
    run = run_of({"x": "AB", "y": "B"}, "AB", wanted="x")
    assert run.feed.take() == 10
    run.feed.finished(10)
    assert run.supply.gone == ["A"]


def test_a_failure_is_raised_only_when_nothing_runs():
    run = run_of({"x": "A", "y": "B"}, "A")
    run.supply.ended = TransferError("the line is cut")
    assert run.feed.take() == 10  # what is here is used
    assert run.feed.take() is None
    run.feed.finished(10)
    with pytest.raises(TransferError, match="the line is cut"):
        run.feed.take()


def test_a_failure_after_the_last_start_is_nobodys_concern():
    run = run_of({"x": "A"}, "A")
    assert run.feed.take() == 10
    run.supply.ended = TransferError("the line is cut")
    assert run.feed.take() is None
    run.feed.finished(10)
    assert run.feed.take() is None
