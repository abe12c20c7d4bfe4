"""Prompts in chunks against token by token and against the dense float64 oracle; what must not change a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.compute import delta_kernels
from runtime.engine import Engine, Evaluation
from runtime.models import kda
from runtime.models.mla import LatentAttention
from runtime.models.recall import Recall
from runtime.options import RunOptions
from tests.containers import build_container, k3_config, kimi_linear_config
from tests.runtime.oracle import Oracle, causal_softmax, delta_rule, relative_error, sigmoid

TOLERANCE = 1e-5
IDS = np.random.default_rng(11).integers(0, 640, 130).tolist()
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127]
CHUNKS = [2, 16, 50, 512]


@pytest.fixture(scope="module", params=["k3", "kimi_linear"])
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def one_by_one(folder: Path) -> Evaluation:
    """All of IDS, token by token."""
    return evaluated(folder, IDS, chunk=1)


def evaluated(folder: Path, ids: list[int], **options: Any) -> Evaluation:
    with Engine.open(folder, RunOptions(**options)) as engine:
        return engine.evaluate(ids, trace=True)


def assert_close(found: Evaluation, expected: Evaluation, tolerance: float = TOLERANCE) -> None:
    assert {layer: ids.tolist() for layer, ids in found.routing.items()} == {
        layer: ids.tolist() for layer, ids in expected.routing.items()
    }
    for one, other in zip([*found.layers, found.logits], [*expected.layers, expected.logits], strict=True):
        assert one.shape == other.shape
        assert relative_error(one, other) <= tolerance


def assert_equal(found: Evaluation, expected: Evaluation) -> None:
    assert_close(found, expected, tolerance=0)


def test_chunks_of_any_size_equal_token_by_token(folder: Path, one_by_one: Evaluation) -> None:
    for chunk in CHUNKS:
        assert_close(evaluated(folder, IDS, chunk=chunk), one_by_one)


def test_prompts_of_any_length_equal_token_by_token(folder: Path, one_by_one: Evaluation) -> None:
    expected = one_by_one.logits
    with Engine.open(folder, RunOptions(chunk=64)) as engine:
        for length in LENGTHS:
            state = engine.new_state()
            assert relative_error(engine.feed(state, IDS[:length]), expected[length - 1]) <= TOLERANCE
            rest = IDS[length : length + 3]  # token by token from where the chunks left the state
            for n, token_id in enumerate(rest):
                assert relative_error(engine.step(state, token_id), expected[length + n]) <= TOLERANCE


@settings(max_examples=6)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from(CHUNKS))
def test_a_prompt_in_pieces_goes_on_from_the_state(
    folder: Path, one_by_one: Evaluation, pieces: list[int], chunk: int
) -> None:
    ends = np.cumsum(pieces)
    with Engine.open(folder, RunOptions(chunk=chunk)) as engine:
        state = engine.new_state()
        found = [engine.evaluate(IDS[end - n : end], state=state).logits for n, end in zip(pieces, ends, strict=True)]
    assert state.position == sum(pieces)
    assert relative_error(np.concatenate(found), one_by_one.logits[: sum(pieces)]) <= TOLERANCE


def test_bits_do_not_depend_on_threads_or_lookahead(folder: Path) -> None:
    ids = IDS[:83]  # the last chunk is one token
    expected = evaluated(folder, ids, chunk=41, threads=1, lookahead=0)
    for threads, lookahead in ((2, 6), (3, 1), (2, 0)):
        assert_equal(evaluated(folder, ids, chunk=41, threads=threads, lookahead=lookahead), expected)


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_experts": 16, "num_experts_per_token": 3, "num_expert_group": 4, "topk_group": 2},
        # nothing is a multiple of a tile, a group or a vector register
        {"hidden_size": 200, "kv_lora_rank": 72, "moe_intermediate_size": 40, "intermediate_size": 330},
        {"linear_attn_config": {"gate_lower_bound": None, "short_conv_kernel_size": 2}, "attn_res_block_size": None},
    ],
    ids=str,
)
def test_settings_that_matter_to_chunks(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = build_container(tmp_path, k3_config(num_hidden_layers=4, **overrides))
    ids = IDS[:40]
    found = evaluated(folder, ids, chunk=23)
    oracle = Oracle(folder)
    logits, _ = oracle.logits(ids)
    assert {layer: chosen.tolist() for layer, chosen in found.routing.items()} == oracle.routing
    assert relative_error(found.logits, logits) <= TOLERANCE
    assert_close(found, evaluated(folder, ids, chunk=1))


@pytest.mark.parametrize("rate", [-9.0, 4.5], ids=["nearly no decay", "all forgotten at once"])
def test_extreme_decays(tmp_path: Path, rate: float) -> None:
    change = {f"model.layers.{layer}.self_attn.A_log": lambda a_log: a_log * 0 + np.float32(rate) for layer in range(5)}
    folder = build_container(tmp_path, kimi_linear_config(num_hidden_layers=3), change=change)
    ids = IDS[:40]
    found = evaluated(folder, ids, chunk=40)
    assert_close(found, evaluated(folder, ids, chunk=1))
    assert relative_error(found.logits, Oracle(folder).logits(ids)[0]) <= TOLERANCE


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


@given(
    st.integers(1, 20), st.integers(1, 3), st.floats(-8, 3), st.floats(0, 3), st.booleans(), st.integers(0, 2**32 - 1)
)
def test_a_block_of_the_delta_rule(
    n_tokens: int, heads: int, size: float, spread: float, skip: bool, seed: int
) -> None:
    """Decays from none to all at once, of one size or of many: the system of a block, or the recurrence."""
    rng = np.random.default_rng(seed)
    width, first = 24, 1 if skip and heads > 1 else 0
    q, k, v = (normal(rng, n_tokens + 1, heads, width) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -np.exp(size + spread * normal(rng, n_tokens + 1, heads, width)).astype(np.float32)
    beta = sigmoid(normal(rng, n_tokens + 1, heads)).astype(np.float32)
    state, out = normal(rng, heads, width, width), np.zeros_like(v)
    before = state.copy()
    with np.errstate(all="ignore"):
        kda._delta_block(state, q, k, v, log_decay, beta, out, slice(1, n_tokens + 1), slice(first, heads))
    np.testing.assert_array_equal(state[:first], before[:first])
    assert not out[0].any()
    for h in range(first, heads):
        # the oracle begins with zeros: whole columns of the state are put there by as many tokens without decay
        loaded = [np.eye(width), before[h].astype(np.float64), np.zeros((width, width)), np.ones(width)]
        parts = [each[1:, h].astype(np.float64) for each in (q, k, v, log_decay)]
        expected = delta_rule(
            np.concatenate([loaded[0], parts[0]]),
            np.concatenate([loaded[0], parts[1]]),
            np.concatenate([loaded[1], parts[2]]),
            np.concatenate([loaded[2], parts[3]]),
            np.concatenate([loaded[3], beta[1:, h].astype(np.float64)]),
        )[width:]
        np.testing.assert_allclose(out[1:, h], expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_the_convolution_goes_on_over_chunks(kernel: int, n_tokens: int, n_chunks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, taps = normal(rng, n_chunks * n_tokens, 6), normal(rng, kernel, 6)
    window, out = np.zeros((kernel - 1, 6), np.float32), np.empty_like(x)
    for start in range(0, len(x), n_tokens):
        chunk, target = x[start : start + n_tokens], out[start : start + n_tokens]
        half = n_tokens // 2
        delta_kernels.conv_silu_rows(window, taps, chunk, 0, target[:half])
        delta_kernels.conv_silu_rows(window, taps, chunk, half, target[half:])
        delta_kernels.shift_window(window, chunk)
    padded = np.concatenate([np.zeros((kernel - 1, 6)), x])
    y = np.stack([np.sum(padded[t : t + kernel] * taps, axis=0) for t in range(len(x))])
    np.testing.assert_allclose(out, y * sigmoid(y), rtol=1e-5, atol=1e-6)


def test_latent_attention_over_many_blocks_of_positions(k3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and blocks, of which whole ones lie ahead of a query; scores of any size."""
    monkeypatch.setattr("runtime.models.mla.BLOCK_POSITIONS", 8)
    rng = np.random.default_rng(2)
    for n_queries, n_positions in ((3, 3), (7, 20), (20, 21), (8, 8)):
        rows, queries = 3 * normal(rng, n_positions, 96), 3 * normal(rng, n_queries, 96)
        with Engine.open(k3) as engine:
            [attention, *_] = [
                layer.attention for layer in engine._model.layers if isinstance(layer.attention, LatentAttention)
            ]
            found = attention._mixed(queries, rows, 64)
        wide = np.zeros((n_positions, n_positions))
        wide[-n_queries:] = queries.astype(np.float64) @ rows.T / np.sqrt(96)
        np.testing.assert_allclose(found, (causal_softmax(wide) @ rows[:, :64])[-n_queries:], rtol=0, atol=2e-5)


def test_recall_counts_hits_by_rank() -> None:
    recall = Recall(3)
    recall.observe(1, np.array([4, 5]))  # nothing was guessed
    recall.guess(1, np.array([5, 7, 4]))
    recall.observe(1, np.array([4, 5]))
    recall.guess(2, np.array([9, 1, 2]))
    recall.observe(2, np.array([9, 10]))
    recall.observe(2, np.array([9, 10]))  # a guess counts once
    assert recall.trials == 2
    assert recall.hits == [2, 0, 1]


def test_the_lookahead_is_counted_where_single_tokens_are_taken(k3: Path) -> None:
    with Engine.open(k3, RunOptions(chunk=8)) as engine:
        engine.evaluate(IDS[:17])  # two chunks and one token: five MoE layers, each guessed at from the one before
        assert engine.recall.trials == 5
        assert len(engine.recall.hits) == 2
        assert all(0 <= hits <= 5 for hits in engine.recall.hits)
    with Engine.open(k3, RunOptions(lookahead=0)) as engine:
        engine.step(engine.new_state(), 3)
        assert (engine.recall.trials, engine.recall.hits) == (0, [])
