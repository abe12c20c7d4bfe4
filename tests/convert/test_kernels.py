"""Each compiled loop against its obvious numpy version."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal

from convert.encodings.mxfp4 import E2M1, E8M0
from convert.kernels import BLOCK, decode_mxfp4, encode_residual, fit_rows, move_to_means, scale_rows
from tests.checkpoints import unpack_mxfp4
from tests.convert import oracle
from tests.strategies import weights

F32_LARGEST = np.finfo(np.float32).max
F32_SMALLEST = np.float32(1e-45)


def scale(rows):
    """(rows scaled in place, divisors, first bad row)."""
    out, divisors = rows.copy(), np.full(len(rows), np.nan)
    return out, divisors, scale_rows(out, divisors)


def test_mxfp4_decoding():
    rng = np.random.default_rng(0)
    packed = rng.integers(256, size=(5, 48), dtype=np.uint8)
    scales = rng.integers(250, size=(5, 3), dtype=np.uint8)
    out = np.full((5, 96), np.nan, dtype=np.float32)
    decode_mxfp4(packed, scales, E2M1, E8M0, out)
    assert_array_equal(out.view(np.uint32), unpack_mxfp4(packed, scales).view(np.uint32))


@given(rows=weights())
def test_scaling(rows):
    found, divisors, bad = scale(rows)
    expected, expected_divisors = oracle.scaled(rows)
    assert bad == -1
    assert_allclose(divisors, expected_divisors, rtol=1e-12, atol=0)
    assert_allclose(found, expected, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("value", [F32_SMALLEST, 1e-40, 1e-30, 1, 1e30, 1e38, F32_LARGEST])
@pytest.mark.parametrize("fill", ["one", "all"])
def test_scaling_at_both_ends_of_f32(value, fill):
    """The divisor of a row with one smallest subnormal is itself below f32: it must not become 0."""
    rows = np.zeros((1, 512), dtype=np.float32)
    rows[0, 0 if fill == "one" else slice(None)] = value
    found, divisors, bad = scale(rows)
    assert bad == -1
    assert divisors[0] == pytest.approx(float(value) * (512**-0.5 if fill == "one" else 1), rel=1e-6)
    assert np.square(found, dtype=np.float64).mean() == pytest.approx(1, rel=1e-5)


def test_scaling_leaves_zero_rows_alone():
    rows = np.array([[0, -0.0, 0], [1, 2, 3]], dtype=np.float32)
    found, divisors, bad = scale(rows)
    assert (bad, divisors[0]) == (-1, 0)
    assert not found[0].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 1, 3])
def test_scaling_finds_the_first_bad_row(value, row):
    rows = np.ones((4, 40), dtype=np.float32)
    rows[row:, 17] = value
    found, _, bad = scale(rows)
    assert bad == row
    assert_array_equal(found[row:], rows[row:])  # untouched, so that the message can count bad weights


def assert_greedy(vectors, books, codes, residual):
    """The codes are a greedy search's, up to ties in f32, and the residual is what they leave."""
    left = vectors.astype(np.float64)
    for stage, book in enumerate(books):
        distances = oracle.squared_distances(left, book)
        chosen = distances[np.arange(len(left)), codes[:, stage]]
        size = np.square(left).sum(axis=1) + np.square(book.astype(np.float64)).sum(axis=1).max()
        assert (chosen <= distances.min(axis=1) + 1e-6 * size).all()
        left = left - book.astype(np.float64)[codes[:, stage]]
    assert_allclose(residual, left, rtol=0, atol=1e-5 * max(1, np.abs(vectors).max()))


def search(vectors, books):
    codes = np.full((len(vectors), len(books)), 255, dtype=np.uint8)
    residual = np.full_like(vectors, np.nan)
    encode_residual(vectors, books, codes, residual)
    return codes, residual


@pytest.mark.parametrize("n_vectors", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
@pytest.mark.parametrize(("n_stages", "n_entries"), [(3, 256), (2, 256), (4, 64), (1, 2)])
def test_search_is_greedy(n_vectors, n_stages, n_entries):
    rng = np.random.default_rng(n_vectors)
    vectors = rng.standard_normal((n_vectors, 8), dtype=np.float32)
    sizes = 0.5 ** np.arange(n_stages, dtype=np.float32)
    books = rng.standard_normal((n_stages, n_entries, 8), dtype=np.float32) * sizes[:, None, None]
    codes, residual = search(vectors, books)
    assert_greedy(vectors, books, codes, residual)
    expected, _ = oracle.greedy(vectors, books)
    assert (codes == expected).all(axis=1).mean() > 0.99  # all but ties


@given(
    vectors=hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.just(8)), elements=st.floats(-50, 50, width=32)),
    books=hnp.arrays(np.float16, (2, 4, 8), elements=st.floats(-8, 8, width=16)),
)
def test_search_of_anything(vectors, books):
    codes, residual = search(vectors, books.astype(np.float32))
    assert_greedy(vectors, books, codes, residual)


def test_search_agrees_with_faiss():
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((4000, 8), dtype=np.float32)
    book = rng.standard_normal((256, 8), dtype=np.float32)
    codes, residual = search(vectors, book[None])
    index = faiss.IndexFlatL2(8)
    index.add(book)
    distances, labels = index.search(vectors, 1)
    assert_allclose(np.square(residual).sum(axis=1), distances[:, 0], rtol=1e-4, atol=1e-5)
    assert (codes[:, 0] == labels[:, 0]).mean() > 0.999


def test_of_equal_entries_the_first_is_taken():
    book = np.repeat(np.float32([[1], [1], [-1], [-1]]), 8, axis=1)
    vectors = np.float32([[2] * 8, [-2] * 8, [0] * 8])
    codes, _ = search(vectors, book[None])
    assert codes[:, 0].tolist() == [0, 2, 0]


def test_a_vector_is_encoded_alike_wherever_it_stands():
    """Strips differ in length and place; their bytes must not."""
    rng = np.random.default_rng(5)
    vectors = rng.standard_normal((3 * BLOCK, 8), dtype=np.float32)
    books = rng.standard_normal((3, 256, 8), dtype=np.float32)
    codes, residual = search(vectors, books)
    for start, stop in ((0, 1), (5, 700), (BLOCK - 1, BLOCK + 1), (1000, 3 * BLOCK)):
        part_codes, part_residual = search(vectors[start:stop], books)
        assert_array_equal(part_codes, codes[start:stop])
        assert_array_equal(part_residual.view(np.uint32), residual[start:stop].view(np.uint32))


@given(data=st.data())
def test_moving_entries_to_means(data):
    n, n_entries = data.draw(st.integers(0, 30)), 4
    residual = data.draw(hnp.arrays(np.float32, (n, 8), elements=st.floats(-10, 10, width=32)))
    codes = data.draw(hnp.arrays(np.uint8, (n, 2), elements=st.integers(0, n_entries - 1)))
    entries = np.ones((n_entries, 8), dtype=np.float32)
    left = residual.copy()
    move_to_means(left, codes, 1, entries)
    for entry in range(n_entries):
        users = codes[:, 1] == entry
        mean = residual[users].astype(np.float64).mean(axis=0) if users.any() else np.zeros(8)
        assert_allclose(entries[entry], 1 + mean, rtol=1e-6, atol=1e-6)
        assert_allclose(left[users], residual[users] - mean, rtol=0, atol=2e-6)


@given(data=st.data())
def test_row_sums(data):
    shape = (data.draw(st.integers(1, 5)), 8 * data.draw(st.integers(1, 20)))
    rows, residual = (data.draw(hnp.arrays(np.float32, shape, elements=st.floats(-60, 60, width=32))) for _ in range(2))
    sums = np.full((shape[0], 3), np.nan)
    fit_rows(rows, residual, sums)
    x = rows.astype(np.float64)
    y = x - residual.astype(np.float64)
    expected = np.stack([(x * y).sum(axis=1), (y * y).sum(axis=1), (x * x).sum(axis=1)], axis=1)
    assert_allclose(sums, expected, rtol=1e-12, atol=1e-10)
