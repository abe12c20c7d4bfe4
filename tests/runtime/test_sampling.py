"""How tokens are drawn, against a slow version by the definitions and against exact probabilities."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from container.errors import MoedockError, UsageError
from runtime.text.sampling import Sampler, Sampling

F32 = npt.NDArray[np.float32]


def logits_of(*values: float) -> F32:
    return np.array(values, dtype=np.float32)


def slow(logits: F32, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Token → probability, one token at a time."""
    greatest = max(map(float, logits))
    weights = {token: math.exp((float(logit) - greatest) / temperature) for token, logit in enumerate(logits)}
    order = sorted(weights, key=lambda token: (-float(logits[token]), token))[: top_k or len(logits)]
    total = math.fsum(weights[token] for token in order)
    kept: list[int] = []
    for token in order:
        if top_p < 1 and kept and math.fsum(weights[other] for other in kept) >= top_p * total:
            break
        kept.append(token)
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


# eighths of a logit and a few values, so that many are equal
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=600)


@given(
    LOGITS,
    st.floats(0.05, 5),
    st.one_of(st.just(0), st.integers(1, 700)),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
)
@example([1.0, 1.0, 1.0, 0.0], 1.0, 2, 1.0)
@example([0.0] * 600, 1.0, 0, 0.987)  # more than are sorted at first
@example([0.0] * 600, 1.0, 590, 0.987)
def test_candidates_are_those_of_the_definition(
    values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    logits = logits_of(*values)
    ids, shares = Sampler(Sampling(temperature=temperature, top_k=top_k, top_p=top_p)).candidates(logits)
    found = dict(zip(ids.tolist(), shares.tolist(), strict=True))
    expected = slow(logits, temperature, top_k, top_p)
    if set(found) != set(expected):  # a share that is p to the last bit may fall on either side
        longer = max(found, expected, key=len)
        assert abs(len(found) - len(expected)) == 1
        found, expected = slow_of(found, longer), slow_of(expected, longer)
    assert found == pytest.approx(expected, rel=1e-12)


def slow_of(shares: dict[int, float], longer: dict[int, float]) -> dict[int, float]:
    kept = list(longer)[:-1]
    total = math.fsum(longer[token] for token in kept)
    return {token: longer[token] / total for token in kept} if len(shares) == len(longer) else shares


def test_shares_by_hand() -> None:
    """Weights 1, 2, 4, 8 of 15: exact fractions."""
    logits = logits_of(*(math.log(2) * n for n in (0, 1, 2, 3)))
    cases: list[tuple[Sampling, dict[int, Fraction]]] = [
        (Sampling(temperature=1), {3: Fraction(8, 15), 2: Fraction(4, 15), 1: Fraction(2, 15), 0: Fraction(1, 15)}),
        (Sampling(temperature=0.5), {3: Fraction(64, 85), 2: Fraction(16, 85), 1: Fraction(4, 85), 0: Fraction(1, 85)}),
        (Sampling(temperature=1, top_k=2), {3: Fraction(8, 12), 2: Fraction(4, 12)}),
        (Sampling(temperature=1, top_p=0.5), {3: Fraction(1)}),
        (Sampling(temperature=1, top_p=0.54), {3: Fraction(8, 12), 2: Fraction(4, 12)}),  # the one that crosses stays
        (Sampling(temperature=1, top_k=3, top_p=0.86), {3: Fraction(8, 14), 2: Fraction(4, 14), 1: Fraction(2, 14)}),
        (Sampling(temperature=1, top_k=3, top_p=0.85), {3: Fraction(8, 12), 2: Fraction(4, 12)}),  # p of what k left
    ]
    for sampling, expected in cases:
        ids, shares = Sampler(sampling).candidates(logits)
        found = dict(zip(ids.tolist(), shares.tolist(), strict=True))
        assert found == pytest.approx({token: float(share) for token, share in expected.items()}, rel=1e-6), sampling
    ids, _ = Sampler(Sampling(temperature=1, top_p=0.5)).candidates(logits_of(2.0, 2.0))
    assert ids.tolist() == [0], "a half is reached by the first half"


class _Numbers:
    """A generator that gives chosen numbers."""

    def __init__(self, numbers: list[float]) -> None:
        self._numbers = numbers

    def random(self) -> float:
        return self._numbers.pop(0)


def test_a_number_falls_on_the_token_whose_share_holds_it() -> None:
    """Exact: over a grid of numbers in [0, 1) each token is drawn for exactly its share of them."""
    logits = logits_of(*np.log([3.0, 1.0, 4.0]))
    sampler = Sampler(Sampling(temperature=1.0))
    sampler._random = _Numbers([(n + 0.5) / 800 for n in range(800)])  # type: ignore[assignment]
    drawn = [sampler.draw(logits) for _ in range(800)]
    assert [drawn.count(token) for token in range(3)] == [300, 100, 400]
    numbers = [0.0, np.nextafter(0.5, 0.0), 0.5, np.nextafter(1.0, 0.0)]
    sampler._random = _Numbers(numbers)  # type: ignore[assignment]
    assert [sampler.draw(logits_of(2.0, 2.0)) for _ in range(4)] == [0, 0, 1, 1], "shares begin closed and end open"


def test_draws_follow_the_shares() -> None:
    """Chi-square of 4,000 draws with a fixed seed: its 5 degrees of freedom exceed 20.5 once in 1,000 times."""
    logits = logits_of(0.0, 1.5, -1.0, 0.5, 1.0, 2.0, -9.0)
    sampler = Sampler(Sampling(temperature=0.8, top_k=6, seed=7))
    n_draws = 4000
    drawn = [sampler.draw(logits) for _ in range(n_draws)]
    expected = slow(logits, 0.8, 6, 1.0)
    assert sum((drawn.count(t) - n_draws * share) ** 2 / (n_draws * share) for t, share in expected.items()) < 20.5
    assert set(drawn) == set(expected)


def test_greedy_takes_the_likeliest_and_of_equals_the_first() -> None:
    sampler = Sampler()
    before = sampler.state()
    assert sampler.draw(logits_of(1, 3, 3, 2)) == 1
    assert sampler.state() == before, "nothing is drawn"
    assert Sampler(Sampling(temperature=1, top_k=1)).draw(logits_of(1, 3, 3, 2)) == 1
    assert Sampler(Sampling(temperature=5e-324)).draw(logits_of(-3e38, 3e38, 1, 3e38)) in (1, 3)


def test_seeds() -> None:
    logits = np.zeros(1000, dtype=np.float32)

    def draws(sampler: Sampler) -> list[int]:
        return [sampler.draw(logits) for _ in range(8)]

    hot = {"temperature": 1.0}
    assert draws(Sampler(Sampling(**hot, seed=3))) == draws(Sampler(Sampling(**hot, seed=3)))
    assert draws(Sampler(Sampling(**hot, seed=3))) != draws(Sampler(Sampling(**hot, seed=4)))
    unseeded = Sampler(Sampling(**hot))
    drawn = draws(unseeded)
    assert drawn != draws(Sampler(Sampling(**hot)))
    assert drawn == draws(Sampler(Sampling(**hot, seed=unseeded.seed))), "the seed is told"


@given(st.integers(0, 2**64), st.integers(0, 30))
def test_a_restored_sampler_goes_on(seed: int, n_before: int) -> None:
    logits = np.linspace(0, 3, 50, dtype=np.float32)
    sampler = Sampler(Sampling(temperature=1.0, seed=seed))
    for _ in range(n_before):
        sampler.draw(logits)
    other = Sampler(Sampling(temperature=1.0, seed=1))
    other.restore(json.loads(json.dumps(sampler.state())))
    assert [other.draw(logits) for _ in range(5)] == [sampler.draw(logits) for _ in range(5)]


@pytest.mark.parametrize(
    "bad",
    [
        {},
        7,
        {"bit_generator": "MT19937"},
        {"bit_generator": "PCG64"},
        {"bit_generator": "PCG64", "state": 5, "has_uint32": 0, "uinteger": 0},
        {"bit_generator": "PCG64", "state": {"state": "x", "inc": 1}, "has_uint32": 0, "uinteger": 0},
        {"bit_generator": "PCG64", "state": {"state": -1, "inc": 1}, "has_uint32": 0, "uinteger": 0},
        {"bit_generator": "PCG64", "state": {"state": 1 << 200, "inc": 1}, "has_uint32": 0, "uinteger": 0},
        {"bit_generator": "PCG64", "state": {"state": 1, "inc": 1}, "has_uint32": 0, "uinteger": 1 << 99},
        {"bit_generator": "PCG64", "state": {"state": 1, "inc": 1}, "has_uint32": 0, "uinteger": 0, "more": 0},
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(bad: dict[str, object]) -> None:
    sampler = Sampler(Sampling(seed=5))
    before = sampler.state()
    with pytest.raises(ValueError, match="generator"):
        sampler.restore(bad)
    assert sampler.state() == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.01}, "top-p"),
        ({"top_p": math.nan}, "top-p"),
        ({"seed": -1}, "seed"),
    ],
)
def test_senseless_values(values: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_damaged_logits(temperature: float, bad: float) -> None:
    with pytest.raises(MoedockError, match="weights are damaged; --verify says which"):
        Sampler(Sampling(temperature=temperature)).draw(logits_of(1, bad, 2))
