"""The beam search against the slow one that it documents, code for code, and against a textbook beam search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from container.layout import VQ2R, VQ3R, VQ4P, ExpertQuant
from convert.beam import MAX_WIDTH, BeamTables, beam_search
from convert.codebooks import train_codebooks
from convert.greedy import greedy_search
from tests.convert import oracle

QUANTS = {quant.fmt.name: quant for quant in (VQ3R, VQ2R, VQ4P)}
WIDTHS = [2, 3, 4, 8, 12, 16, 32, 48, MAX_WIDTH]


def gaussian(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 8), dtype=np.float32)


@pytest.fixture(scope="module", params=QUANTS)
def books(request) -> np.ndarray:
    """Entries [stages, n, 8] f32 of each format, trained on Gaussian vectors."""
    quant: ExpertQuant = QUANTS[request.param]
    return train_codebooks(gaussian(8192, seed=1), quant, seed=0, beam_width=4).astype(np.float32)


@pytest.fixture(scope="module")
def tables(books) -> BeamTables:
    return BeamTables.of(books)


def squared_errors(vectors, codes, books):
    return np.square(vectors - oracle.sum_of_entries(codes, books)).sum(axis=1)


def relative_error(vectors, codes, books):
    return (squared_errors(vectors, codes, books).sum() / np.square(vectors, dtype=np.float64).sum()) ** 0.5


def test_tables(books, tables):
    n_stages, n_entries, _ = books.shape
    wide = books.astype(np.float64)
    columns = tables.columns.reshape(n_stages, n_entries // 16, 8, 16).transpose(0, 1, 3, 2)
    assert_array_equal(columns.reshape(books.shape), -2 * books)
    assert_allclose(tables.norms.reshape(n_stages, n_entries), np.square(wide).sum(axis=-1), rtol=1e-6, atol=1e-9)
    products = tables.products.reshape(n_stages, n_stages, n_entries, n_entries)
    sizes = np.sqrt(tables.norms.reshape(n_stages, n_entries))
    for i, j in itertools.combinations(range(n_stages), 2):
        away = np.abs(products[i, j] - 2 * wide[i] @ wide[j].T)
        assert (away <= 1e-6 * sizes[i][:, None] * sizes[j] + 1e-9).all()
    assert all(part.ctypes.data % 64 == 0 for part in (tables.columns, tables.norms, tables.products))


@pytest.mark.parametrize("width", WIDTHS)
def test_search_is_what_it_says(tables, width):
    """Every code of every vector: the oracle makes the same roundings."""
    vectors = gaussian(90 if width < 32 else 30, seed=width)
    assert_array_equal(beam_search(vectors, tables, width), oracle.bucketed_beam(vectors, tables, width))


@pytest.mark.parametrize("n_vectors", [0, 1, 15, 16, 17, 100])
def test_any_number_of_vectors(books, tables, n_vectors):
    vectors = gaussian(n_vectors, seed=n_vectors)
    codes = beam_search(vectors, tables, 6)
    assert (codes.shape, codes.dtype) == ((n_vectors, len(books)), np.uint8)
    assert_array_equal(codes, oracle.bucketed_beam(vectors, tables, 6).reshape(codes.shape))


# Largest excess of the relative error over that of a textbook beam, in points: what buckets and short costs lose.
EXCESS = {2: 0.05, 4: 0.1, 16: 0.15, MAX_WIDTH: 0.12}


@pytest.mark.parametrize("width", EXCESS)
def test_little_is_lost_to_a_textbook_beam(books, tables, width):
    vectors = gaussian(800 if width < 16 else 250, seed=5)
    found = relative_error(vectors, beam_search(vectors, tables, width), books)
    best = relative_error(vectors, oracle.textbook_beam(vectors, books, width), books)
    assert -0.05 < 100 * (found - best) < EXCESS[width]


def test_wider_is_better(books, tables):
    """In total, from greedy search on; a single vector can be unlucky."""
    vectors = gaussian(4000, seed=6)
    codes = [greedy_search(vectors, books)] + [beam_search(vectors, tables, width) for width in WIDTHS]
    errors = [relative_error(vectors, found, books) for found in codes]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]


@pytest.mark.parametrize("width", [5, 16])
def test_a_vector_is_encoded_alike_wherever_it_stands(tables, width):
    """Strips differ in length and place, and sixteen vectors are searched together; their bytes must not differ."""
    vectors = gaussian(200, seed=7)
    vectors[::7] *= 40
    vectors[::11] = 0
    codes = beam_search(vectors, tables, width)
    for start, stop in ((0, 1), (5, 70), (15, 17), (150, 200)):
        assert_array_equal(beam_search(vectors[start:stop], tables, width), codes[start:stop])
    order = np.random.default_rng(0).permutation(len(vectors))
    assert_array_equal(beam_search(vectors[order], tables, width), codes[order])


@pytest.mark.parametrize("magnitude", [0, 1e-45, 1e-39, 1e-20, 1e-3, 5, 60, 1e4, 1e12, 1e18])
def test_vectors_of_any_magnitude(books, tables, magnitude):
    """From zeros over outliers, as far as squares go."""
    vectors = (gaussian(20, seed=8).clip(-3, 3) * np.float64(magnitude)).astype(np.float32)
    codes = beam_search(vectors, tables, 16)
    assert_array_equal(codes, oracle.bucketed_beam(vectors, tables, 16))
    best = squared_errors(vectors, oracle.textbook_beam(vectors, books, 16), books)
    # costs are compared with 11 bits; that is what swamps a choice
    assert (squared_errors(vectors, codes, books) <= 1.05 * best + 0.1).all()


@pytest.mark.parametrize("n_entries", [16, 32, 48, 64])
def test_two_stages_of_few_entries_are_searched_exhaustively(n_entries):
    """As wide as the first stage has entries, each in a bucket of its own, nothing is left out."""
    rng = np.random.default_rng(n_entries)
    books = rng.standard_normal((2, n_entries, 8), dtype=np.float32)
    vectors = 2 * gaussian(64, seed=9)
    sums = books[0][:, None] + books[1][None]
    best = oracle.squared_distances(vectors, sums.reshape(-1, 8)).min(axis=1)
    found = squared_errors(vectors, beam_search(vectors, BeamTables.of(books), n_entries), books)
    # the beams' costs have lost up to 2**-9 of |x - c|² <= 100, so a choice may be worse by that much
    assert (found <= best + 100 * 2.0**-9).all()
    assert (found <= best + 1e-4).mean() > 0.9


@given(
    n_stages=st.integers(2, 4), n_entries=st.sampled_from([64, 128, 256]), width=st.integers(2, 20), seed=st.integers(0)
)
def test_ties_of_every_sort(n_stages, n_entries, width, seed):
    """Entries and vectors of few values in few places: equal entries, equal sums, zeros."""
    rng = np.random.default_rng(seed)
    entries = rng.choice(np.float32([0, 0, 1, -1, 0.5]), (n_stages, n_entries, 8))
    entries[:, :, rng.integers(1, 8) :] = 0
    tables = BeamTables.of(entries)
    vectors = rng.choice(np.float32([0, 1, 2.5]), (3, 8))
    assert_array_equal(beam_search(vectors, tables, width), oracle.bucketed_beam(vectors, tables, width))


def test_of_equal_entries_one_is_taken():
    """A codebook of one entry 256 times over, another of pairs: still the best sum."""
    books = np.zeros((3, 256, 8), dtype=np.float32)
    books[0] = 1
    books[1] = np.repeat(gaussian(128, seed=3), 2, axis=0)
    vectors = 1 + books[1, [0, 2, 40, 254]]
    codes = beam_search(vectors, BeamTables.of(books), 16)
    assert_array_equal(codes[:, 1] // 2, [0, 1, 20, 127])


@pytest.mark.parametrize("width", [0, 1, 17, MAX_WIDTH + 1])
def test_a_width_it_cannot_have(width):
    entries = np.zeros((2, 256 if width > MAX_WIDTH else 16, 8), dtype=np.float32)
    with pytest.raises(ValueError, match=f"a beam of {width} among"):
        beam_search(np.zeros((1, 8), dtype=np.float32), BeamTables.of(entries), width)
