"""Every kernel against the slow obvious version in float64, over ragged shapes and all formats."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.indices import index_bytes, pack_indices
from container.layout import EXPERT_QUANTS, VEC_DIM, ExpertQuant, TrunkFormat
from container.model import KINDS
from container.records import ExpertRecord
from container.trunk import pack_rows, unpack_rows
from runtime import experts, gates, kernels
from runtime.matrix import Matrix
from tests.runtime.oracle import F64, causal_softmax, delta_rule, dense_expert_matrix, rms, sigmoid, situ
from tests.strategies import quants

F32 = npt.NDArray[np.float32]
TOLERANCE = 1e-6
formats = st.sampled_from(list(TrunkFormat))
seeds = st.integers(0, 1 << 32)
columns = st.one_of(st.integers(1, 20), st.integers(120, 136), st.integers(250, 400))


def close(found: npt.NDArray[np.floating], expected: F64, weight: F64 | float = 0.0) -> None:
    """Relative to the size of what was summed: a sum that cancels may lose more of itself."""
    size = np.maximum(np.abs(expected), weight)
    assert np.all(np.abs(found - expected) <= TOLERANCE * size + 1e-30)


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, dtype=np.float32)


def stored(rng: np.random.Generator, rows: int, cols: int, fmt: TrunkFormat) -> tuple[Matrix, F64]:
    """A matrix as the runtime holds it, and its dense meaning."""
    values, scales = pack_rows(normal(rng, rows, cols), fmt)
    return Matrix(values, scales, cols, fmt), unpack_rows(values, scales, cols, fmt).astype(np.float64)


@given(formats, st.integers(1, 40), columns, seeds)
def test_matvec(fmt: TrunkFormat, rows: int, cols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, dense = stored(rng, rows, cols, fmt)
    x = normal(rng, cols)
    found = matrix.matvec(x)
    assert found.dtype == np.float32
    assert found.shape == (rows,)
    close(found, dense @ x, np.abs(dense) @ np.abs(x))


@given(formats, st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3), columns, seeds)
def test_heads_and_their_transpose(
    fmt: TrunkFormat, heads: int, count: int, first: int, behind: int, cols: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    stride = first + count + behind
    matrix, dense = stored(rng, heads * stride, cols, fmt)
    parts = dense.reshape(heads, stride, cols)[:, first : first + count]
    x, y = normal(rng, heads, cols), normal(rng, heads, count)
    close(
        matrix.matvec_heads(x, stride=stride, first=first, count=count),
        np.einsum("hic,hc->hi", parts, x),
        np.einsum("hic,hc->hi", np.abs(parts), np.abs(x)),
    )
    close(
        matrix.transposed_heads(y, stride=stride, first=first),
        np.einsum("hic,hi->hc", parts, y),
        np.einsum("hic,hi->hc", np.abs(parts), np.abs(y)),
    )


@pytest.mark.parametrize("fmt", list(TrunkFormat))
def test_long_dot_products_keep_their_precision(fmt: TrunkFormat) -> None:
    rng = np.random.default_rng(7)
    matrix, dense = stored(rng, 64, 7168, fmt)
    x = normal(rng, 7168)
    expected = dense @ x
    assert np.linalg.norm(matrix.matvec(x) - expected) <= 2e-7 * np.linalg.norm(expected)


@pytest.mark.parametrize("fmt", list(TrunkFormat))
def test_garbage_in_the_padding_of_a_row_does_not_count(fmt: TrunkFormat) -> None:
    values, scales = pack_rows(np.ones((2, 130), dtype=np.float32), fmt)
    if fmt is not TrunkFormat.F32:
        values[:, -16:] = 0x77
    np.testing.assert_allclose(Matrix(values, scales, 130, fmt).matvec(np.ones(130, np.float32)), 130, rtol=1e-3)


@pytest.mark.parametrize(
    ("x", "stride", "first", "count"),
    [
        (np.zeros((2, 7), np.float32), 4, 0, 4),  # too narrow
        (np.zeros((2, 8), np.float64), 4, 0, 4),  # kernels are compiled for f32
        (np.zeros((2, 8), np.float32), 4, 1, 4),  # one row too far
        (np.zeros((2, 8), np.float32), 4, -1, 4),
        (np.zeros((3, 8), np.float32), 4, 0, 4),  # a head too many
    ],
)
def test_a_shape_that_does_not_fit_is_refused(x: F32, stride: int, first: int, count: int) -> None:
    matrix, _ = stored(np.random.default_rng(0), 8, 8, TrunkFormat.F32)
    with pytest.raises(ValueError, match="does not fit"):
        matrix.matvec_heads(x, stride=stride, first=first, count=count)


def random_record(rng: np.random.Generator, quant: ExpertQuant, shapes: dict[str, tuple[int, int]]) -> ExpertRecord:
    indices, scales = {}, {}
    for kind, (rows, cols) in shapes.items():
        codes = rng.integers(quant.n_entries, size=(rows, cols // VEC_DIM, quant.n_stages), dtype=np.uint8)
        indices[kind] = pack_indices(codes, quant)
        scales[kind] = np.exp(normal(rng, rows)).astype(np.float16)
    return ExpertRecord(0, 0, 0, indices, scales)


@given(quants, st.one_of(st.integers(1, 5), st.integers(60, 70), st.integers(125, 131)), st.integers(1, 140), seeds)
def test_expert_matvec_equals_the_unpacked_matrix(quant: ExpertQuant, rows: int, n_vectors: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = {"gate": (rows, n_vectors * VEC_DIM), "up": (rows, 8), "down": (8, 8)}
    record = random_record(rng, quant, shapes)
    books = normal(rng, 3, quant.n_stages, quant.n_entries, VEC_DIM).astype(np.float16)
    codebooks = experts.LayerCodebooks(books)
    for n, kind in enumerate(KINDS):
        x = normal(rng, shapes[kind][1])
        table = codebooks.table(kind, x)
        dense = dense_expert_matrix(record, kind, shapes[kind], books[n].astype(np.float64), quant)
        close(table, np.einsum("sed,vd->vse", books[n].astype(np.float64), x.reshape(-1, VEC_DIM)), 10.0)
        # stages may cancel each other, so the size of a sum is that of its stages
        parts = np.abs(table).max(axis=2).astype(np.float64).sum() * record.scales[kind].astype(np.float64)
        close(experts.matvec(record, kind, table), dense @ x, parts)


def test_index_bytes_that_do_not_fit_the_table_are_refused() -> None:
    rng = np.random.default_rng(0)
    for quant in EXPERT_QUANTS.values():
        record = random_record(rng, quant, {"gate": (64, 32)})
        table = np.zeros((3, quant.n_stages, quant.n_entries), np.float32)
        assert record.indices["gate"].size == index_bytes((64, 32), quant)
        with pytest.raises(ValueError, match="do not fit"):
            experts.matvec(record, "gate", table)


def test_a_vector_that_cannot_be_cut_has_no_table() -> None:
    codebooks = experts.LayerCodebooks(np.zeros((3, 3, 256, 8), np.float16))
    with pytest.raises(ValueError, match="cannot be cut"):
        codebooks.table("gate", np.zeros(12, np.float32))


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
    out = np.empty(1, np.float32)
    gates.gate_situ(np.array([gate], np.float32), np.array([up], np.float32), 4.0, 25.0, out)
    assert out[0] == pytest.approx(expected, rel=1e-6, abs=1e-30)


def test_situ_without_linear_beta_leaves_up_as_it_is() -> None:
    gate, up, out = np.array([1.5], np.float32), np.array([300], np.float32), np.empty(1, np.float32)
    gates.gate_situ(gate, up, 4.0, 0.0, out)
    close(out, 4 * np.tanh(1.5 / 4) * sigmoid(np.array([1.5])) * 300)


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
    kernels.decay_bounded(raw, bias, rate, -5.0, out)
    assert out[0, 0] == pytest.approx(bounded, rel=2e-6, abs=1e-30)
    kernels.decay_softplus(raw, bias, rate, out)
    assert out[0, 0] == pytest.approx(softplus, rel=2e-6, abs=1e-30)


def test_decay_rates_belong_to_heads_not_channels() -> None:
    raw, rate, out = np.ones((2, 2), np.float32), np.array([1, 2], np.float32), np.empty((2, 2), np.float32)
    kernels.decay_softplus(raw, np.zeros_like(raw), rate, out)
    assert out[0, 0] == out[0, 1]
    assert out[1, 0] == 2 * out[0, 0]


@given(st.integers(1, 300), seeds)
def test_elementwise_gates(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gate, up, out = 5 * normal(rng, n), normal(rng, n), np.empty(n, np.float32)
    wide_gate, wide_up = gate.astype(np.float64), up.astype(np.float64)
    gates.gate_silu(gate, up, out)
    close(out, wide_gate * sigmoid(wide_gate) * wide_up)
    gates.gate_situ(gate, up, 4.0, 25.0, out)
    close(out, situ(wide_gate, wide_up, 4.0, 25.0))
    gates.multiply_sigmoid(up, gate, out)
    close(out, wide_up * sigmoid(wide_gate))


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


@given(st.integers(1, 5), st.integers(1, 8), seeds)
def test_convolution_over_a_sequence(kernel: int, n_tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, taps = normal(rng, n_tokens, 6), normal(rng, kernel, 6)
    window, out = np.zeros((kernel - 1, 6), np.float32), np.empty((n_tokens, 6), np.float32)
    for t in range(n_tokens):
        kernels.conv_silu(window, taps, x[t], out[t])
    padded = np.concatenate([np.zeros((kernel - 1, 6)), x])
    y = np.stack([np.sum(padded[t : t + kernel] * taps, axis=0) for t in range(n_tokens)])
    np.testing.assert_allclose(out, y * sigmoid(y), rtol=1e-5, atol=1e-6)


@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 12), seeds)
def test_delta_rule_over_a_sequence(heads: int, width: int, n_tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = (normal(rng, n_tokens, heads, width) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -np.abs(normal(rng, n_tokens, heads, width))
    beta = sigmoid(normal(rng, n_tokens, heads)).astype(np.float32)
    state, out = np.zeros((heads, width, width), np.float32), np.empty_like(v)
    for t in range(n_tokens):
        kernels.delta_step(state, q[t], k[t], v[t], log_decay[t], beta[t], out[t])
    for h in range(heads):
        expected = delta_rule(*(each[:, h].astype(np.float64) for each in (q, k, v, log_decay, beta)))
        np.testing.assert_allclose(out[:, h], expected, rtol=0, atol=2e-6 * max(1.0, np.abs(expected).max()))


@given(st.integers(1, 3), st.integers(1, 200), st.integers(1, 40), st.integers(0, 20), seeds)
def test_latent_attention_sees_every_position(heads: int, n_positions: int, latent: int, rope: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache, queries = normal(rng, n_positions, latent + rope), normal(rng, heads, latent + rope)
    out = np.empty((heads, latent), np.float32)
    kernels.latent_attention(cache, queries, 0.25, out)
    wide = cache.astype(np.float64)
    for h in range(heads):
        # the last row of a causal softmax sees all positions
        scores = np.tile(wide @ queries[h] * 0.25, (n_positions, 1))
        expected = causal_softmax(scores)[-1] @ wide[:, :latent]
        np.testing.assert_allclose(out[h], expected, rtol=0, atol=3e-6)


def test_attention_scores_of_any_size_do_not_overflow() -> None:
    out = np.empty((1, 1), np.float32)
    kernels.latent_attention(np.array([[300], [200]], np.float32), np.array([[300]], np.float32), 1.0, out)
    assert out[0, 0] == 300
