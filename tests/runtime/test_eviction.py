"""What is evicted: the formula against a slow one, and the hit rates on a recorded routing against published ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.disk.eviction import EvictionPolicy
from tests.benchmarks import cache_trace

LAYERS, N_EXPERTS = (1, 2, 4), 4
KEYS = np.arange(len(LAYERS) * N_EXPERTS)
ALL = np.ones(len(KEYS), dtype=np.bool_)

# (layer's position, experts, tokens of the chunk)
Passes = list[tuple[int, list[int], int]]
passes = st.lists(
    st.tuples(
        st.integers(0, len(LAYERS) - 1),
        st.lists(st.integers(0, N_EXPERTS - 1), unique=True, min_size=1),
        st.sampled_from([1, 1, 1, 2, 7]),
    ),
    min_size=1,
    max_size=20,
)


def slow_scores(calls: Passes) -> list[float]:
    """The formula of `runtime.disk.eviction`, one past use at a time; a chunk's uses spread evenly over its tokens."""
    now, position, uses = 0, len(LAYERS) - 1, []
    for turn, experts, n_tokens in calls:
        if turn <= position:
            now += n_tokens
        position = turn
        for expert in experts:
            uses += [(turn * N_EXPERTS + expert, now - back) for back in range(n_tokens)]
    scores = []
    for key in KEYS:
        ages = [now - when for used, when in uses if used == key]
        short, long = (sum(2 ** (-age / half_life) for age in ages) for half_life in (4, 300))
        turns = next(n for n in range(len(LAYERS)) if (position + 1 + n) % len(LAYERS) == key // N_EXPERTS)
        scores.append(short + 0.2 * long - 0.3 * turns / len(LAYERS))
    return scores


@given(passes, st.lists(st.booleans(), min_size=len(KEYS), max_size=len(KEYS)))
@settings(deadline=None)
def test_the_lowest_score_goes(calls: Passes, evictable: list[bool]) -> None:
    policy = EvictionPolicy(LAYERS, N_EXPERTS)
    for position, experts, n_tokens in calls:
        policy.victim(KEYS, ALL)  # leaves no trace
        policy.use(LAYERS[position], experts, None, n_tokens)
    victim = policy.victim(KEYS, np.array(evictable))
    if not any(evictable):
        assert victim is None
        return
    assert victim is not None
    assert evictable[victim]
    scores = slow_scores(calls)
    assert scores[victim] == pytest.approx(min(s for s, free in zip(scores, evictable, strict=True) if free), abs=1e-9)


def test_one_layer_evicts_several_in_the_order_of_their_scores() -> None:
    policy = EvictionPolicy(LAYERS, N_EXPERTS)
    for n_uses, expert in enumerate((2, 0, 3, 1)):
        for _ in range(n_uses + 1):
            policy.use(2, [expert])
    keys = np.array([policy.key(2, expert) for expert in (0, 1, 2, 3)])
    evictable = np.ones(4, dtype=np.bool_)
    assert policy.victim(keys, evictable) == 2
    keys[2], evictable[2] = policy.key(2, 2) + N_EXPERTS, False  # being filled
    evictable[3] = False  # pinned meanwhile
    keys[[0, 1]] = keys[[1, 0]]  # emptied and filled anew
    assert policy.victim(keys, evictable) == 1


def test_a_chunk_counts_each_token_that_wants_an_expert() -> None:
    policy = EvictionPolicy(LAYERS, N_EXPERTS)
    policy.use(1, [0, 2], [5, 3], 6)
    policy.use(2, [1], [6], 6)
    policy.use(1, [2])
    uses, seen = policy.counted()
    assert {int(key): int(uses[key]) for key in np.flatnonzero(uses)} == {0: 5, 2: 4, 5: 6}
    assert (seen[0], seen[2], seen[5]) == (6, 7, 6)
    assert policy.n_tokens == 7
    assert [policy.expert(policy.key(layer, 3)) for layer in LAYERS] == [(layer, 3) for layer in LAYERS]


def test_what_is_expected_is_kept_until_a_layer_asks_again() -> None:
    policy = EvictionPolicy(LAYERS, N_EXPERTS)
    for _ in range(3):
        policy.use(1, [0, 1])
    policy.use(2, [0])
    policy.expect(4, [0, 1, 2, 3])
    kept = np.isin(KEYS, [policy.key(1, 0), *(policy.key(4, expert) for expert in range(4))])
    assert policy.victim(KEYS, kept) == policy.key(1, 0)
    assert policy.victim(KEYS, kept & (policy.key(1, 0) != KEYS)) is not None  # if need be, they go too
    policy.use(4, [3])
    assert policy.victim(KEYS, kept) in [policy.key(4, expert) for expert in (0, 1, 2)]


def test_what_was_learnt_orders_the_experts_and_gives_way_to_the_text_at_hand() -> None:
    policy = EvictionPolicy(LAYERS, N_EXPERTS)
    learnt = np.zeros(len(KEYS), dtype=np.int64)
    learnt[[3, 7, 9]] = (500_000, 100_000, 900_000)
    policy.learn(learnt, 1_000_000)
    assert policy.hottest().tolist() == [9, 3, 7]
    for _ in range(60):
        policy.use(1, [0])
    assert policy.victim(KEYS, np.isin(KEYS, [0, 7])) == 7


def test_a_sample_takes_what_may_go_and_a_seed_decides_which() -> None:
    n = 3000
    keys = np.arange(n) % len(KEYS)
    evictable = np.zeros(n, dtype=np.bool_)
    evictable[::7] = True

    def chosen(seed: int) -> list[int | None]:
        policy = EvictionPolicy(LAYERS, N_EXPERTS, seed=seed)
        return [policy.victim(keys, evictable) for _ in range(20)]

    assert all(slot is not None and slot % 7 == 0 for slot in chosen(0))
    assert chosen(0) == chosen(0) != chosen(1)
    only = np.arange(n) == 2999  # where no sample finds it
    assert EvictionPolicy(LAYERS, N_EXPERTS).victim(keys, only) == 2999


@pytest.mark.skipif(not cache_trace.TRACE.is_file(), reason="the recorded routing is not here")
@pytest.mark.parametrize(
    ("share", "published"),
    [
        pytest.param(*item, marks=() if item[0] in (3, 48) else pytest.mark.slow)
        for item in cache_trace.PUBLISHED.items()
    ],
)
def test_hit_rates_on_the_recorded_routing(share: int, published: float) -> None:
    """Cold, on demand only, the whole trace counted; the store's own slots and policy."""
    trace = cache_trace.read_trace(cache_trace.TRACE)
    assert trace.shape == (300, 26, 8)
    assert 100 * cache_trace.hit_rate(trace, cache_trace.slots_of(share, trace)) >= published
