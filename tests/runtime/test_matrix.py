"""Trunk matrices against their dense meaning in float64: ragged shapes, all formats, the same bits on any threads."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.layout import TrunkFormat
from container.trunk import pack_rows, unpack_rows
from runtime.compute import lanes, matrix
from runtime.compute.matrix import Matrix, multiply_all
from runtime.compute.team import Team
from tests.runtime.kernel_checks import F32, ONE, close, normal, seeds, teams
from tests.runtime.oracle import F64

formats = st.sampled_from(list(TrunkFormat))
columns = st.one_of(st.integers(1, 20), st.integers(120, 136), st.integers(250, 400))


@pytest.fixture(autouse=True, scope="module")
def share_everything() -> Iterator[None]:
    """Let the teams share even the smallest work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "_LEAST_WEIGHTS", 0)
        yield


def stored(rng: np.random.Generator, rows: int, cols: int, fmt: TrunkFormat) -> tuple[Matrix, F64]:
    """A matrix as the runtime holds it, and its dense meaning."""
    values, scales = pack_rows(normal(rng, rows, cols), fmt)
    return Matrix(values, scales, cols, fmt, ONE), unpack_rows(values, scales, cols, fmt).astype(np.float64)


def shared(matrix: Matrix, team: Team) -> Matrix:
    return Matrix(matrix.values, matrix.scales, matrix.cols, matrix.fmt, team)


def test_every_f16_number_is_widened_exactly() -> None:
    @numba.njit
    def widen(bits: npt.NDArray[np.uint16], out: F32) -> None:
        for n in range(bits.size):
            out[n] = lanes.widened(bits[n])

    bits, out = np.arange(1 << 16, dtype=np.uint16), np.empty(1 << 16, np.float32)
    widen(bits, out)
    expected = bits.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(out[numbers].view(np.uint32), expected[numbers].view(np.uint32))  # -0.0 is not 0.0
    assert np.isnan(out[~numbers]).all()


@given(formats, st.integers(1, 40), columns, teams, seeds)
def test_matvec(fmt: TrunkFormat, rows: int, cols: int, team: Team, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, dense = stored(rng, rows, cols, fmt)
    x = normal(rng, cols)
    found = matrix(x[None])[0]
    assert found.dtype == np.float32
    assert found.shape == (rows,)
    close(found, dense @ x, np.abs(dense) @ np.abs(x))
    assert np.array_equal(shared(matrix, team)(x[None])[0], found)


@given(st.lists(st.tuples(formats, st.integers(1, 40)), min_size=1, max_size=5), columns, teams, seeds)
def test_several_matrices_at_once(shapes: list[tuple[TrunkFormat, int]], cols: int, team: Team, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrices = [stored(rng, rows, cols, fmt)[0] for fmt, rows in shapes]
    x = normal(rng, 1, cols)
    found = multiply_all([shared(each, team) for each in matrices], x)
    for each, out in zip(matrices, found, strict=True):
        assert np.array_equal(out, each(x))


@pytest.mark.parametrize("fmt", list(TrunkFormat))
def test_a_matrix_that_begins_anywhere(fmt: TrunkFormat) -> None:
    """Containers of other writers align nothing, but numba takes every array for aligned."""
    rng = np.random.default_rng(3)
    matrix, _ = stored(rng, 5, 300, fmt)
    moved = []
    for array in (matrix.values, matrix.scales):
        room = np.empty(array.nbytes + 1, np.uint8)
        room[1:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        moved.append(room[1:].view(array.dtype).reshape(array.shape))
    x = normal(rng, 300)
    found = Matrix(moved[0], moved[1], 300, fmt, ONE)
    assert np.array_equal(found(x[None])[0], matrix(x[None])[0])
    assert found._elements.flags.aligned
    assert found._scale_bits.flags.aligned


@given(formats, st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3), columns, teams, seeds)
def test_heads_and_their_transpose(
    fmt: TrunkFormat, heads: int, count: int, first: int, behind: int, cols: int, team: Team, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    stride = first + count + behind
    matrix, dense = stored(rng, heads * stride, cols, fmt)
    parts = dense.reshape(heads, stride, cols)[:, first : first + count]
    x, y = normal(rng, heads, cols), normal(rng, heads, count)
    products = matrix.matvec_heads(x, stride=stride, first=first, count=count)
    close(products, np.einsum("hic,hc->hi", parts, x), np.einsum("hic,hc->hi", np.abs(parts), np.abs(x)))
    sums = matrix.transposed_heads(y, stride=stride, first=first)
    close(sums, np.einsum("hic,hi->hc", parts, y), np.einsum("hic,hi->hc", np.abs(parts), np.abs(y)))
    other = shared(matrix, team)
    assert np.array_equal(other.matvec_heads(x, stride=stride, first=first, count=count), products)
    assert np.array_equal(other.transposed_heads(y, stride=stride, first=first), sums)


@pytest.mark.parametrize("fmt", list(TrunkFormat))
def test_long_dot_products_keep_their_precision(fmt: TrunkFormat) -> None:
    rng = np.random.default_rng(7)
    matrix, dense = stored(rng, 64, 7168, fmt)
    x = normal(rng, 7168)
    expected = dense @ x
    assert np.linalg.norm(matrix(x[None])[0] - expected) <= 2e-7 * np.linalg.norm(expected)


@pytest.mark.parametrize("fmt", list(TrunkFormat))
def test_garbage_in_the_padding_of_a_row_does_not_count(fmt: TrunkFormat) -> None:
    values, scales = pack_rows(np.ones((2, 130), dtype=np.float32), fmt)
    if fmt is not TrunkFormat.F32:
        values[:, -16:] = 0x77
    np.testing.assert_allclose(Matrix(values, scales, 130, fmt, ONE)(np.ones((1, 130), np.float32)), 130, rtol=1e-3)


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
