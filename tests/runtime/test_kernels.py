"""Gates, norms, the delta rule and latent attention against the slow obvious version in float64, over ragged shapes.

Where a property draws a team, its threads must find the same bits as one.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.compute import gates, row_kernels
from runtime.compute.attention_kernels import latent_attention
from runtime.compute.delta_kernels import decay_bounded, decay_softplus, delta_step
from runtime.compute.gates import Activation
from runtime.compute.team import Team
from tests.runtime.kernel_checks import ONE, close, normal, seeds, teams
from tests.runtime.oracle import causal_softmax, delta_rule, rms, sigmoid, situ


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1, 1, 0.71581783),
        (-2, 3, -0.65787382),
        (10, 50, 95.1080215),
        (0.5, -0.25, -0.07740211),
        (-30, -100, 9.35134e-12),
        (-200, 1, 0.0),
    ],
)
def test_situ_spot_values(gate: float, up: float, expected: float) -> None:
    assert gates.gated(np.float32(gate), np.float32(up), 4.0, 25.0) == pytest.approx(expected, rel=1e-6, abs=1e-30)


def test_situ_without_linear_beta_leaves_up_as_it_is() -> None:
    found = gates.gated(np.float32(1.5), np.float32(300), 4.0, 0.0)
    close(np.array([found]), 4 * np.tanh(1.5 / 4) * sigmoid(np.array([1.5])) * 300)


@pytest.mark.parametrize(
    ("a_log", "z", "bounded", "softplus"),
    [
        (0, 0, -2.5, -0.693147),
        (1, -1, -0.309516, -0.851534),
        (-1, 2, -3.380339, -0.782453),
        (2.5, 0.3, -4.873921, -10.408178),
        (0, 100, -5.0, -100.0),  # softplus is linear above 20
        (0, -200, 0.0, 0.0),
    ],
)
def test_decay_spot_values(a_log: float, z: float, bounded: float, softplus: float) -> None:
    raw, bias = np.array([[z - 0.25]], np.float32), np.array([[0.25]], np.float32)
    rate, out = np.exp(np.array([a_log], np.float32)), np.empty((1, 1), np.float32)
    decay_bounded(raw, bias, rate, -5.0, out)
    assert out[0, 0] == pytest.approx(bounded, rel=2e-6, abs=1e-30)
    decay_softplus(raw, bias, rate, out)
    assert out[0, 0] == pytest.approx(softplus, rel=2e-6, abs=1e-30)


def test_decay_rates_belong_to_heads_not_channels() -> None:
    raw, rate, out = np.ones((2, 2), np.float32), np.array([1, 2], np.float32), np.empty((2, 2), np.float32)
    decay_softplus(raw, np.zeros_like(raw), rate, out)
    assert out[0, 0] == out[0, 1]
    assert out[1, 0] == 2 * out[0, 0]


@given(st.integers(1, 3), st.integers(1, 300), seeds)
def test_elementwise_gates(rows: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gate, up, out = 5 * normal(rng, rows, n), normal(rng, rows, n), np.empty((rows, n + 1), np.float32)[:, :n]
    wide_gate, wide_up = gate.astype(np.float64), up.astype(np.float64)
    Activation()(gate, up, out)
    close(out, wide_gate * sigmoid(wide_gate) * wide_up)
    Activation(4.0, 25.0)(gate, up, out)
    close(out, situ(wide_gate, wide_up, 4.0, 25.0))
    row_kernels.sigmoid_rows(gate)
    close(gate, sigmoid(wide_gate))


@given(st.integers(1, 4), st.integers(1, 300), seeds, st.sampled_from([1e-4, 1.0, 1e4]))
def test_norms(rows: int, n: int, seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    x, weight = np.float32(size) * normal(rng, rows, n), normal(rng, n)
    out = np.empty_like(x)
    gates.rms_norm(x, weight, 1e-5, out)
    close(out, rms(x.astype(np.float64), weight.astype(np.float64), 1e-5))
    expected = x.astype(np.float64)
    expected = expected / np.sqrt(np.sum(expected**2, axis=1, keepdims=True) + 1e-6) * 0.125
    gates.l2_norm(x, 1e-6, 0.125)
    close(x, expected)


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 12), teams, seeds)
def test_delta_rule_over_a_sequence(heads: int, width: int, n_tokens: int, team: Team, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = (normal(rng, n_tokens, heads, width) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -np.abs(normal(rng, n_tokens, heads, width))
    beta = sigmoid(normal(rng, n_tokens, heads)).astype(np.float32)
    results = []
    for team_of_run in (ONE, team):
        state, out = np.zeros((heads, width, width), np.float32), np.empty_like(v)
        for t in range(n_tokens):
            team_of_run.run(partial(delta_step, state, q[t], k[t], v[t], log_decay[t], beta[t], out[t]), heads)
        results.append((state, out))
    for h in range(heads):
        expected = delta_rule(*(each[:, h].astype(np.float64) for each in (q, k, v, log_decay, beta)))
        np.testing.assert_allclose(results[0][1][:, h], expected, rtol=0, atol=2e-6 * max(1.0, np.abs(expected).max()))
    assert all(np.array_equal(one, other) for one, other in zip(*results, strict=True))


@given(st.integers(1, 4), st.integers(1, 200), st.integers(1, 40), st.integers(0, 20), teams, seeds)
def test_latent_attention_sees_every_position(
    heads: int, n_positions: int, latent: int, rope: int, team: Team, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    cache, queries = normal(rng, n_positions, latent + rope), normal(rng, heads, latent + rope)
    out, same = np.empty((heads, latent), np.float32), np.empty((heads, latent), np.float32)
    latent_attention(cache, queries, 0.25, out, 0, heads)
    team.run(partial(latent_attention, cache, queries, 0.25, same), heads)
    assert np.array_equal(out, same)
    wide = cache.astype(np.float64)
    for h in range(heads):
        # the last row of a causal softmax sees all positions
        scores = np.tile(wide @ queries[h] * 0.25, (n_positions, 1))
        expected = causal_softmax(scores)[-1] @ wide[:, :latent]
        np.testing.assert_allclose(out[h], expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("n_positions", [2, 200])
def test_attention_scores_of_any_size_do_not_overflow(n_positions: int) -> None:
    cache, out = np.full((n_positions, 1), 200, np.float32), np.empty((1, 1), np.float32)
    cache[n_positions // 2] = 300
    latent_attention(cache, np.array([[300]], np.float32), 1.0, out, 0, 1)
    assert out[0, 0] == 300
