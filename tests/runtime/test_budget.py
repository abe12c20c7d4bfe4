"""How a budget is chosen, on made-up machines and a made-up plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import MoedockError
from container.machine import MemoryFigures
from runtime.memory.budget import choose_budget
from runtime.memory.plan import SLOT_NOTES_BYTES, MemoryPlan
from runtime.memory.report import plan_report, plan_text

GIB = 1 << 30


def plan(**changes: int) -> MemoryPlan:
    """Roughly Kimi K3: a floor of 30 GiB, a working set of almost 16 GiB, 160 GiB of experts with notes about them."""
    parts = {
        "context": 4096,
        "chunk": 512,
        "n_threads": 4,
        "process_bytes": GIB // 2,
        "trunk_bytes": 27 * GIB,
        "derived_bytes": 0,
        "codebook_bytes": 0,
        "kda_state_bytes": GIB // 2,
        "latent_bytes_per_position": GIB // 8192,
        "scratch_bytes": GIB,
        "stride_bytes": GIB // 64 - SLOT_NOTES_BYTES,
        "minimum_slots": 32,
        "experts_per_token": 16 * 64,
        "n_experts": 160 * 64,
    }
    return MemoryPlan(**(parts | changes))


def machine(physical: float | None, available: float | None = None, *, limit: float | None = None, swap: float = 0):
    def n_bytes(gib: float | None) -> int | None:
        return None if gib is None else int(gib * GIB)

    return MemoryFigures(
        physical_bytes=n_bytes(physical),
        available_bytes=n_bytes(available),
        limit_bytes=n_bytes(limit),
        swap_used_bytes=int(swap * GIB),
    )


def test_an_idle_machine_gives_seven_eighths() -> None:
    assert plan().floor_bytes == 30 * GIB
    assert choose_budget(plan(), machine(128, 124)).n_bytes == 112 * GIB
    assert choose_budget(plan(), machine(128, None)).n_bytes == 112 * GIB  # as macOS tells it


@pytest.mark.parametrize(
    ("figures", "gib"),
    [
        (machine(128, 119), 96),  # 119 - 8 to spare = 111: one working set down
        (machine(128, 100), 80),  # 92: two down
        (machine(128, 124, swap=10), 96),  # 124 - 8 - 10 = 106
        (machine(128, 60), 48),  # 52: four down
        (machine(128, 39), 31),  # a whole step would end below the floor: what is left over is the budget
        (machine(64, 62), 56),
        (machine(36, 35), 31.5),
        (machine(128, 124, limit=64), 56),  # 7/8 of the limit
        (machine(128, 60, limit=64), 56),  # the group itself holds 4 already: 60 - 4 to spare
        (machine(512, 500), 189.5),  # every expert cached: 30 - 0.5 + 160
    ],
)
def test_the_default_goes_down_in_steps_of_a_working_set(figures: MemoryFigures, gib: float) -> None:
    budget = choose_budget(plan(), figures)
    assert budget.n_bytes / GIB == pytest.approx(gib, abs=0.02)  # a working set is 2 MiB less than 16 GiB
    assert budget.warning is None


@given(
    physical=st.floats(1, 600),
    free=st.floats(0, 1),
    limit=st.none() | st.floats(1, 600),
    swap=st.floats(0, 50),
    working_set=st.integers(0, 16 * 64),
)
def test_the_default_is_safe_or_refused(
    physical: float, free: float, limit: float | None, swap: float, working_set: int
) -> None:
    figures = machine(physical, physical * free, limit=limit, swap=swap)
    wanted = plan(experts_per_token=working_set)
    least = min(physical, limit or physical) * GIB
    safe = min(least * 7 / 8, physical * free * GIB - least / 16 - swap * GIB)
    try:
        budget = choose_budget(wanted, figures).n_bytes
    except MoedockError:
        assert safe < wanted.floor_bytes + 2
    else:
        assert wanted.floor_bytes <= budget <= min(safe + 2, wanted.most_bytes)
        # no more is given up than one step, or what lies above the most that helps
        assert budget > min(safe - wanted.working_set_bytes, wanted.most_bytes) - 2


def test_too_little_memory_is_refused_with_all_figures() -> None:
    with pytest.raises(MoedockError) as refused:
        choose_budget(plan(), machine(32, 31, limit=28, swap=1))
    message = str(refused.value)
    for figure in ("at least 30.0 GiB", "24.5 GiB", "memory 32.0 GiB", "limit 28.0 GiB", "swap in use 1.0 GiB"):
        assert figure in message
    for part in ("27.0 GiB  trunk", "latent cache of 4096 positions", "chunk of 512 tokens", "32 experts", "--ctx"):
        assert part in message


def test_a_budget_of_the_user_s() -> None:
    figures = machine(128, 64)
    assert choose_budget(plan(), figures, 30 * GIB).n_bytes == 30 * GIB  # the floor itself will do
    with pytest.raises(MoedockError, match=r"at least 30\.0 GiB of memory, the budget is 30\.0 GiB"):
        choose_budget(plan(), figures, 30 * GIB - 1)
    with pytest.raises(MoedockError, match=r"a budget of 129\.0 GiB is more than the 128\.0 GiB"):
        choose_budget(plan(), figures, 129 * GIB)
    with pytest.raises(MoedockError, match=r"more than the 40\.0 GiB"):
        choose_budget(plan(), machine(128, 64, limit=40), 41 * GIB)
    fits, too_much = choose_budget(plan(), figures, 63 * GIB), choose_budget(plan(), figures, 65 * GIB)
    assert fits.warning is None
    assert too_much.n_bytes == 65 * GIB
    assert too_much.warning is not None
    assert "only 64.0 GiB are available now" in too_much.warning
    # what the budget allows and what will be used are not the same where everything fits
    small = plan(n_experts=64)
    assert choose_budget(small, figures, 65 * GIB).warning is None


def test_an_unknown_machine_needs_a_budget() -> None:
    unknown = machine(None)
    with pytest.raises(MoedockError, match="--budget, at least 30"):
        choose_budget(plan(), unknown)
    assert choose_budget(plan(), unknown, 33 * GIB).n_bytes == 33 * GIB


def test_report() -> None:
    report = plan_report(plan(), machine(128, 100), disk_speeds=[8.0])
    assert report["problem"] is None
    assert report["budget_bytes"] / GIB == pytest.approx(80, abs=0.02)
    assert report["cache_bytes"] / GIB == pytest.approx(50.5, abs=0.05)
    assert report["parts"]["latent_cache"] == GIB // 2
    assert sum(report["parts"].values()) == report["floor_bytes"]
    share = 50.5 / 160
    assert report["cached_share"] == pytest.approx(share, rel=1e-3)
    (speed,) = report["speed"]
    uncached = 8e9 / (16 * GIB)
    assert speed["tokens_per_second_uncached"] == pytest.approx(uncached, rel=1e-3)
    assert speed["tokens_per_second_even_routing"] == pytest.approx(uncached / (1 - share), rel=1e-3)
    text = plan_text(plan(), report)
    for figure in ("30.0 GiB  in all", "80.0 GiB", "31.6%", "16.0 GiB", "128.0 KiB a position", "0.47"):
        assert figure in text


def test_report_of_a_machine_that_is_too_small_and_of_one_that_holds_everything() -> None:
    small = plan_report(plan(), machine(16, 15))
    assert small["budget_bytes"] is None
    assert "at least 30.0 GiB" in small["problem"]
    assert small["problem"] in plan_text(plan(), small)
    large = plan_report(plan(), machine(512, 500))
    assert large["cached_share"] == 1.0
    assert {each["tokens_per_second_even_routing"] for each in large["speed"]} == {None}
    assert "any" in plan_text(plan(), large)
