"""Geometry of the plots: scales, ticks and places."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.plots import LEFT, RIGHT, Axis, Scale, Slots

VALUES = st.floats(0, 1e12, allow_subnormal=False).filter(lambda value: value == 0 or value > 1e-12)


@given(VALUES, st.floats(1e-6, 1e6), st.integers(2, 10))
def test_ticks_are_few_round_and_inside(low, size, most):
    size *= max(1.0, low)
    scale = Scale(low, low + size, 0, 100)
    ticks = scale.ticks(most)
    assert 0 < len(ticks) <= most + 1
    assert all(low - 1e-6 * size <= tick <= low + size + 1e-6 * size for tick in ticks)
    steps = {round((b - a) / size, 6) for a, b in pairwise(ticks)}
    assert len(steps) <= 1


def test_ticks_of_known_ranges():
    assert Scale(0, 100, 0, 1).ticks(5) == [0, 20, 40, 60, 80, 100]
    assert Scale(0.151, 0.169, 0, 1).ticks(4) == pytest.approx([0.155, 0.16, 0.165])
    assert Scale(0, 7, 0, 1).ticks(6) == [0, 2, 4, 6]


@given(VALUES, VALUES)
def test_a_scale_stays_inside_its_ends(low, value):
    scale = Scale(low, low + max(1.0, low), 250, 20)
    assert 20 <= scale.at(value) <= 250


def test_a_scale_is_linear():
    scale = Scale(10, 20, 300, 100)
    assert [scale.at(value) for value in (10, 12.5, 20)] == [300, 250, 100]


@given(st.lists(VALUES, max_size=5))
def test_an_axis_holds_its_values(values):
    axis = Axis.of_values(values, "error", str, (300, 10))
    assert axis.scale.low <= min(values, default=0) <= max(values, default=0) < axis.scale.high
    assert axis.ticks


def test_an_axis_begins_at_zero_unless_the_values_are_close_together():
    assert Axis.of_values([0.1, 0.9], "", str, (0, 1)).scale.low == 0
    assert 0.14 < Axis.of_values([0.15, 0.16], "", str, (0, 1)).scale.low < 0.15


def test_ticks_of_an_axis_differ_in_words():
    def show(value):
        return f"{value:.2f}"

    for high, n_ticks in ((0.15001, 1), (0.164, 2), (0.17, 2), (0.2, 5), (0.5, 5)):
        axis = Axis.of_values([0.15, high], "", show, (300, 10))
        assert len(set(axis.ticks.values())) == len(axis.ticks) >= n_ticks, axis


@pytest.mark.parametrize("n", [1, 2, 92, 1000])
def test_slots_divide_the_width_and_labels_keep_their_distance(n):
    slots = Slots([str(number) for number in range(n)], "layer")
    assert slots.centre(0) - slots.width / 2 == pytest.approx(LEFT)
    assert slots.centre(n - 1) + slots.width / 2 == pytest.approx(RIGHT)
    shown = list(slots.shown())
    assert shown[0] == (slots.centre(0), "0")
    places = [x for x, _ in shown]
    assert all(b - a >= 7 * len(str(n - 1)) for a, b in pairwise(places))
