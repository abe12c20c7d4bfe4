"""Products of many tokens against unpacked matrices, and the functions that loops over many numbers use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.indices import pack_indices
from container.layout import EXPERT_QUANTS, VEC_DIM, ExpertQuant, TrunkFormat
from container.records import ExpertRecord
from container.trunk import pack_rows, unpack_rows
from runtime.compute import elementary, products
from runtime.compute.expert_products import ExpertProducts
from runtime.compute.gates import F32, Activation
from runtime.compute.matrix import Matrix
from runtime.compute.team import Team
from tests.runtime.oracle import dense_expert_matrix, sigmoid, situ

seeds = st.integers(0, 2**32 - 1)
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def teams() -> Iterator[list[Team]]:
    opened = [Team(n_threads) for n_threads in (1, 2, 3)]
    yield opened
    for team in opened:
        team.close()


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, dtype=np.float32)


def stored(rng: np.random.Generator, rows: int, cols: int, fmt: TrunkFormat) -> tuple[Any, npt.NDArray[np.float64]]:
    """The parts of a matrix as stored, and what they stand for."""
    values, scales = pack_rows(normal(rng, rows, cols), fmt)
    return (values, scales, cols, fmt), unpack_rows(values, scales, cols, fmt).astype(np.float64)


@given(
    st.sampled_from(list(TrunkFormat)),
    st.one_of(st.integers(1, 130), st.integers(1000, 1100)),
    st.one_of(st.integers(1, 140), st.integers(250, 260)),
    st.integers(2, 20),
    seeds,
)
def test_rows_are_unpacked_exactly_and_multiplied_the_same_by_any_team(
    teams: list[Team], fmt: TrunkFormat, rows: int, cols: int, n_tokens: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parts, dense = stored(rng, rows, cols, fmt)
    x = normal(rng, n_tokens, cols)
    some = slice(rows // 3, rows // 3 + min(rows - rows // 3, 7))
    exact = unpack_rows(parts[0], parts[1], cols, fmt)[some]
    np.testing.assert_array_equal(products.unpacked(Matrix(*parts, teams[0]), some), exact)
    with products.one_blas_thread():
        found = [products.multiply(Matrix(*parts, team), x) for team in teams]
    assert found[0].shape == (n_tokens, rows)
    error = np.abs(found[0] - x @ dense.T) / (np.abs(x) @ np.abs(dense.T) + 1e-30)
    assert error.max() <= TOLERANCE
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@given(st.integers(1, 10_000), st.integers(1, 50_000))
def test_blocks_cover_the_rows_at_whole_tiles(n_rows: int, cols: int) -> None:
    blocks = products.row_blocks(n_rows, cols)
    assert [row for block in blocks for row in (block.start, block.stop)] == [
        0,
        *(block.start for block in blocks[1:] for _ in range(2)),
        n_rows,
    ]
    assert all(block.start < block.stop and block.start % 64 == 0 for block in blocks)
    assert all((block.stop - block.start) * cols <= 4 << 20 or block.stop - block.start <= 64 for block in blocks)


def record_of(rng: np.random.Generator, quant: ExpertQuant, inner: int, outer: int) -> tuple[ExpertRecord, Any]:
    indices, scales, shapes = {}, {}, {"gate": (inner, outer), "up": (inner, outer), "down": (outer, inner)}
    for kind, (rows, cols) in shapes.items():
        codes = rng.integers(quant.n_entries, size=(rows, cols // VEC_DIM, quant.n_stages), dtype=np.uint8)
        indices[kind] = pack_indices(codes, quant)
        scales[kind] = (np.exp(normal(rng, rows)) * cols**-0.5).astype(np.float16)
    return ExpertRecord(0, 0, 0, indices, scales), shapes


@given(
    st.sampled_from(list(EXPERT_QUANTS.values())),
    st.sampled_from([8, 96, 264, 520]),
    st.sampled_from([16, 128, 136]),
    st.sampled_from([Activation(), Activation(4.0, 25.0)]),
    st.integers(1, 12),
    seeds,
)
def test_an_expert_adds_its_weighted_output_to_its_tokens(
    teams: list[Team], quant: ExpertQuant, inner: int, outer: int, activation: Activation, n_tokens: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    record, shapes = record_of(rng, quant, inner, outer)
    books = (normal(rng, 3, quant.n_stages, quant.n_entries, VEC_DIM) / 2).astype(np.float16)
    x, weights = normal(rng, n_tokens, outer), rng.random(n_tokens, dtype=np.float32)
    tokens, before = np.sort(rng.permutation(n_tokens + 3)[:n_tokens]), normal(rng, outer, n_tokens + 3)
    wide = books.astype(np.float64)
    gate, up, down = (
        dense_expert_matrix(record, kind, shape, wide[n], quant) for n, (kind, shape) in enumerate(shapes.items())
    )
    one, two = x @ gate.T, x @ up.T
    expected = before.astype(np.float64)
    expected[:, tokens] += (
        weights[:, None] * ((one * sigmoid(one) * two if activation.beta == 0 else situ(one, two, 4.0, 25.0)) @ down.T)
    ).T
    totals = []
    for team in teams:
        totals.append(before.copy())
        with products.one_blas_thread():
            ExpertProducts(books, activation, team).add_expert(record, x, tokens, weights, totals[-1])
        np.testing.assert_array_equal(totals[-1], totals[0])
    assert np.linalg.norm(totals[0] - expected) <= 1e-5 * np.linalg.norm(expected)


def _looped(function: Any) -> Callable[[F32, F32], None]:
    @nb.njit(error_model="numpy")
    def loop(x: F32, out: F32) -> None:
        for n in range(x.size):
            out[n] = function(x[n])

    return loop


ELEMENTARY: dict[str, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]] = {
    "exp": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(0, x),
}


@pytest.mark.parametrize("name", ELEMENTARY)
def test_elementary_functions(name: str) -> None:
    rng = np.random.default_rng(0)
    small = rng.standard_normal(10_000) * 10 ** rng.uniform(-8, 0, 10_000)
    x = np.concatenate([np.linspace(-87, 88, 100_000), small]).astype(np.float32)
    out = np.empty_like(x)
    loop = _looped(getattr(elementary, name))
    loop(x, out)
    np.testing.assert_allclose(out, ELEMENTARY[name](x.astype(np.float64)), rtol=4e-7, atol=0)
    edge = np.array([np.nan, 1e5, np.inf, -1e5, -np.inf], np.float32)
    out = np.empty_like(edge)
    loop(edge, out)
    largest = {"exp": 1e38, "sigmoid": 1, "tanh": 1, "softplus": 1e5}[name]
    assert np.isnan(out[0])
    assert (out[1:3] >= largest).all()
    assert (np.abs(out[3:] - (-1 if name == "tanh" else 0)) <= 1.3e-38).all()
