"""A team does every item once, on all its threads, whatever the cuts; what a part raises reaches the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.compute import team as team_module
from runtime.compute.team import Team
from tests.runtime.interrupts import interrupted_everywhere

PATIENCE_S = 30


@pytest.fixture(scope="module")
def teams() -> Iterator[list[Team]]:
    made = [Team(n) for n in (1, 2, 3, 5)]
    yield made
    for team in made:
        team.close()


@given(which=st.integers(0, 3), jobs=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=20))
def test_every_item_once_before_run_returns(teams: list[Team], which: int, jobs: list[tuple[int, int]]) -> None:
    for n_items, least in jobs:
        done = [0] * n_items

        def work(start: int, stop: int, done: list[int] = done) -> None:
            assert start < stop
            for item in range(start, stop):
                done[item] += 1

        teams[which].run(work, n_items, least=least)
        assert done == [1] * n_items


def test_parts_run_at_the_same_time_on_all_threads(teams: list[Team]) -> None:
    together = threading.Barrier(5, timeout=PATIENCE_S)
    threads = set()

    def work(start: int, stop: int) -> None:
        name = threading.get_ident()
        if name not in threads:
            threads.add(name)
            together.wait()

    teams[3].run(work, 100)
    assert len(threads) == 5


def test_run_waits_for_the_slowest_part(teams: list[Team]) -> None:
    caller, member_began, done = threading.get_ident(), threading.Event(), []

    def work(start: int, stop: int) -> None:
        if threading.get_ident() == caller:
            assert member_began.wait(PATIENCE_S)
        else:
            member_began.set()
            threading.Event().wait(0.05)
        done.append((start, stop))

    teams[1].run(work, 100)
    assert sum(stop - start for start, stop in done) == 100


def test_work_of_few_items_stays_with_the_caller(teams: list[Team]) -> None:
    calls = []
    teams[3].run(lambda start, stop: calls.append((threading.get_ident(), start, stop)), 9, least=5)
    assert calls == [(threading.get_ident(), 0, 9)]


@pytest.mark.parametrize("bad_part", ["first", "last"])
def test_an_error_of_any_part_is_raised_and_the_team_goes_on(teams: list[Team], bad_part: str) -> None:
    done = []

    def work(start: int, stop: int) -> None:
        done.append(stop - start)
        if (start == 0) if bad_part == "first" else (stop == 100):
            raise KeyError(bad_part)

    for team in teams[1:]:
        done.clear()
        with pytest.raises(KeyError, match=bad_part):
            team.run(work, 100)
        assert sum(done) == 100
        team.run(lambda start, stop: None, 100)


@pytest.mark.parametrize("n_threads", [2, 3])
def test_an_interrupt_at_any_step_leaves_the_team_usable(n_threads: int) -> None:
    """And no part of what was interrupted is worked on any longer when the next work begins."""
    numbers, newest, late = count(), -1, set()

    def work() -> None:
        number, done = next(numbers), [0] * 12

        def part(start: int, stop: int) -> None:
            nonlocal newest
            newest = max(newest, number)
            time.sleep(2e-4)
            if number < newest:
                late.add(number)
            for item in range(start, stop):
                done[item] += 1

        crew.run(part, len(done))
        assert done == [1] * len(done)

    crew = Team(n_threads)
    for _ in interrupted_everywhere(work, [team_module]):
        work()
    crew.close()
    assert next(numbers) > 40
    assert not late


def test_a_closed_team_has_no_threads_left() -> None:
    before = threading.active_count()
    team = Team(4)
    team.run(lambda start, stop: None, 100)
    assert threading.active_count() == before + 3
    team.close()
    assert threading.active_count() == before
    calls = []
    team.run(lambda start, stop: calls.append((start, stop)), 100)  # the caller is left
    assert calls == [(0, 100)]


def test_a_team_of_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="0 threads"):
        Team(0)
