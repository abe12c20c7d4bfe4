"""The greedy search against its definition in f64 and against faiss."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_array_equal

from convert.greedy import BLOCK, greedy_search
from tests.convert import oracle


def assert_greedy(vectors, books, codes):
    """The codes are a greedy search's, up to ties in f32."""
    left = vectors.astype(np.float64)
    for stage, book in enumerate(books):
        distances = oracle.squared_distances(left, book)
        chosen = distances[np.arange(len(left)), codes[:, stage]]
        size = np.square(left).sum(axis=1) + np.square(book.astype(np.float64)).sum(axis=1).max()
        assert (chosen <= distances.min(axis=1) + 1e-6 * size).all()
        left = left - book.astype(np.float64)[codes[:, stage]]


@pytest.mark.parametrize("n_vectors", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
@pytest.mark.parametrize(("n_stages", "n_entries"), [(3, 256), (2, 256), (4, 64), (1, 2)])
def test_search_is_greedy(n_vectors, n_stages, n_entries):
    rng = np.random.default_rng(n_vectors)
    vectors = rng.standard_normal((n_vectors, 8), dtype=np.float32)
    sizes = 0.5 ** np.arange(n_stages, dtype=np.float32)
    books = rng.standard_normal((n_stages, n_entries, 8), dtype=np.float32) * sizes[:, None, None]
    codes = greedy_search(vectors, books)
    assert_greedy(vectors, books, codes)
    expected, _ = oracle.greedy(vectors, books)
    assert (codes == expected).all(axis=1).mean() > 0.99  # all but ties


@given(
    vectors=hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.just(8)), elements=st.floats(-50, 50, width=32)),
    books=hnp.arrays(np.float16, (2, 4, 8), elements=st.floats(-8, 8, width=16)),
)
def test_search_of_anything(vectors, books):
    codes = greedy_search(vectors, books.astype(np.float32))
    assert_greedy(vectors, books, codes)


def test_search_agrees_with_faiss():
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((4000, 8), dtype=np.float32)
    book = rng.standard_normal((256, 8), dtype=np.float32)
    codes = greedy_search(vectors, book[None])
    index = faiss.IndexFlatL2(8)
    index.add(book)
    _, labels = index.search(vectors, 1)
    assert (codes[:, 0] == labels[:, 0]).mean() > 0.999


def test_of_equal_entries_the_first_is_taken():
    book = np.repeat(np.float32([[1], [1], [-1], [-1]]), 8, axis=1)
    vectors = np.float32([[2] * 8, [-2] * 8, [0] * 8])
    codes = greedy_search(vectors, book[None])
    assert codes[:, 0].tolist() == [0, 2, 0]


def test_a_vector_is_encoded_alike_wherever_it_stands():
    """Strips differ in length and place; their bytes must not."""
    rng = np.random.default_rng(5)
    vectors = rng.standard_normal((3 * BLOCK, 8), dtype=np.float32)
    books = rng.standard_normal((3, 256, 8), dtype=np.float32)
    codes = greedy_search(vectors, books)
    for start, stop in ((0, 1), (5, 700), (BLOCK - 1, BLOCK + 1), (1000, 3 * BLOCK)):
        assert_array_equal(greedy_search(vectors[start:stop], books), codes[start:stop])
