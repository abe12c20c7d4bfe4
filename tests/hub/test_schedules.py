"""What fault schedules promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hub import Fault, FaultSchedule, Kind, Part, Planned


def test_what_makes_success_impossible() -> None:
    def final(fault: Fault, count: int | None = None) -> bool:
        return bool(FaultSchedule((Planned(Part.CDN, "x", fault, 0, count),)).final)

    for kind in (Kind.DROP, Kind.FLIP, Kind.REDIRECT_LOOP, Kind.PORTAL, Kind.EXPIRE, Kind.CUT, Kind.STALL):
        assert final(Fault(kind))
        assert not final(Fault(kind), count=1)
    for fault in (Fault(Kind.CUT, at=1), Fault(Kind.STALL, seconds=0.1), Fault(Kind.IGNORE_RANGE), Fault(Kind.GZIP)):
        assert not final(fault)
        assert FaultSchedule((Planned(Part.CDN, "x", fault, 0, None),)).discouraging
    for part, status, discouraging in ((Part.CDN, 403, False), (Part.HUB, 403, True), (Part.HUB, 503, False)):
        once = FaultSchedule((Planned(part, "x", Fault(Kind.STATUS, status=status)),))
        assert bool(once.discouraging) is discouraging
        assert once.permanent == once.final == ()


SIZES = {"config.json": 22, "empty.json": 0, "one.json": 1, "a.safetensors": 5000, "tiktoken.model": 2}


@given(seed=st.integers(0, 2**32), n_faults=st.integers(0, 40), n_permanent=st.integers(0, 5), refusals=st.booleans())
def test_random_schedules(seed: int, n_faults: int, n_permanent: int, refusals: bool) -> None:
    def draw() -> FaultSchedule:
        return FaultSchedule.random(
            seed, SIZES, n_faults=n_faults, n_permanent=n_permanent, refusals=refusals, stall_seconds=(0.25,)
        )

    schedule = draw()
    assert schedule == draw()
    assert len(schedule.final) == len(schedule.permanent) == n_permanent
    lasting = {one.name for one in schedule.final}
    assert len(lasting) == n_permanent
    passing = [one for one in schedule.planned if not one.permanent]
    assert not lasting & {one.name for one in passing}
    assert len({(one.part, one.name, one.first) for one in passing}) == len(passing) <= 2 * n_faults
    assert refusals or len(schedule.discouraging) == n_permanent
    for one in passing:
        assert sum((two.part, two.name) == (one.part, one.name) for two in passing) <= 3
        assert one.fault.seconds in (None, 0.25, 0, 1)
        if one.fault.kind in (Kind.FLIP, Kind.CUT, Kind.STALL, Kind.SILENT_CUT):
            assert one.name is not None
            assert 0 <= one.fault.at < SIZES[one.name]


def test_a_file_is_flipped_once_at_most() -> None:
    planned = FaultSchedule.random(1, SIZES, n_faults=3000, n_per_file=1000).planned
    flipped = [one.name for one in planned if one.fault.kind is Kind.FLIP]
    assert len(flipped) == len(set(flipped)) == sum(size_bytes > 0 for size_bytes in SIZES.values())


def test_random_schedules_have_every_kind() -> None:
    drawn = {one.fault.kind for seed in range(200) for one in FaultSchedule.random(seed, SIZES).planned}
    assert drawn == set(Kind) - {Kind.TRICKLE}  # which takes its time
    with pytest.raises(ValueError, match="6 permanent faults on 5 files"):
        FaultSchedule.random(0, SIZES, n_permanent=6)
