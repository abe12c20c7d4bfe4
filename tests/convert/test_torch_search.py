"""The searches on a torch device against those of the processor: the same codes but for ties, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from container.layout import VQ2R, VQ3R, VQ4P, ExpertQuant
from convert.beam import BeamTables, beam_search
from convert.codebooks import train_codebooks
from convert.greedy import greedy_search
from convert.kernels import scale_rows
from convert.torch_search import TorchBeam, TorchGreedy, chunked_search, fused_products
from tests.convert import oracle
from tests.convert.peak_memory import PeakMemory

CPU = torch.device("cpu")
QUANTS = {quant.fmt.name: quant for quant in (VQ3R, VQ4P, VQ2R)}
WIDTHS = [1, 4, 16, 64]
LARGE = 1 << 30


def gaussian(rows: int, cols: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def mxfp4_like(rows: int, cols: int, seed: int) -> np.ndarray:
    """Few values times powers of two, so that distances often tie."""
    rng = np.random.default_rng(seed)
    values = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])[rng.integers(0, 8, (rows, cols))]
    return values * rng.choice(np.float32([-1, 1]), (rows, cols)) * np.exp2(rng.integers(-8, -5, (rows, 1)))


def with_outliers(rows: int, cols: int, seed: int) -> np.ndarray:
    values = gaussian(rows, cols, seed)
    values[:, ::37] *= 60
    return values


def with_zeros(rows: int, cols: int, seed: int) -> np.ndarray:
    values = gaussian(rows, cols, seed)
    values[::2] = 0
    values[1, : cols // 2] = 0
    return values


SOURCES = {"gaussian": gaussian, "mxfp4": mxfp4_like, "outliers": with_outliers, "zeros": with_zeros}


@pytest.fixture(scope="module", params=QUANTS)
def books(request) -> np.ndarray:
    """Entries [stages, n, 8] f32 of each format, trained on Gaussian vectors."""
    quant: ExpertQuant = QUANTS[request.param]
    return train_codebooks(gaussian(4096, 8, seed=1), quant, seed=0).astype(np.float32)


def vectors_of(source: str) -> np.ndarray:
    """1,024 vectors of row-scaled rows."""
    rows = SOURCES[source](16, 512, seed=7).astype(np.float32)
    assert scale_rows(rows, np.empty(len(rows))) == -1
    return rows.reshape(-1, 8)


def searched(vectors: np.ndarray, books: np.ndarray, width: int, chunk_bytes: int = LARGE) -> np.ndarray:
    tables = TorchGreedy.of(books, CPU) if width == 1 else TorchBeam.of(books, width, CPU)
    return chunked_search(tables, torch.from_numpy(vectors), chunk_bytes).numpy()


def processors(vectors: np.ndarray, books: np.ndarray, width: int) -> np.ndarray:
    return greedy_search(vectors, books) if width == 1 else beam_search(vectors, BeamTables.of(books), width)


def test_products_are_rounded_as_fused_ones():
    """Eight times, each from the exact product and sum: as no matrix product does it."""
    x, columns, start = gaussian(40, 8, seed=8), gaussian(50, 8, seed=9), gaussian(1, 50, seed=10)[0]
    expected = np.tile(start, (len(x), 1))
    for d in range(8):
        exact = x[:, d, None].astype(np.longdouble) * columns[:, d].astype(np.longdouble) + expected
        expected = exact.astype(np.float32)
    found = fused_products(*map(torch.from_numpy, (x, columns, start))).numpy()
    assert_array_equal(found, expected)
    assert (found != (x @ columns.T + start)).any()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("width", WIDTHS)
def test_codes_are_the_processors_but_for_ties(books, source, width, record_property):
    vectors = vectors_of(source)
    found, expected = searched(vectors, books, width), processors(vectors, books, width)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    different = (found != expected).any(axis=1)
    record_property("ties", int(different.sum()))
    assert different.mean() < 1e-3
    errors = [
        np.square(vectors - oracle.sum_of_entries(codes, books)).sum(axis=1)[different] for codes in (found, expected)
    ]
    sizes = np.square(vectors, dtype=np.float64).sum(axis=1)[different]
    assert (np.abs(errors[0] - errors[1]) <= 1e-5 * sizes).all()


@pytest.mark.parametrize("width", [2, 16, 48])
def test_beam_search_is_what_it_says(books, width):
    """Against the slow one, which goes vector by vector and entry by entry."""
    vectors = gaussian(20, 8, seed=width)
    assert_array_equal(searched(vectors, books, width), oracle.bucketed_beam(vectors, BeamTables.of(books), width))


@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("n_vectors", [0, 1, 50])
def test_any_number_of_vectors_in_any_pieces(books, width, n_vectors):
    vectors = gaussian(n_vectors, 8, seed=3)
    whole = searched(vectors, books, width)
    assert (whole.shape, whole.dtype) == ((n_vectors, len(books)), np.uint8)
    tables = TorchGreedy.of(books, CPU) if width == 1 else TorchBeam.of(books, width, CPU)
    for chunk_bytes in (0, 7 * tables.bytes_per_vector):
        assert_array_equal(searched(vectors, books, width, chunk_bytes), whole)


def test_of_equal_entries_the_first_is_taken():
    book = np.repeat(np.float32([[1], [1], [-1], [-1]]), 8, axis=1)
    vectors = np.float32([[2] * 8, [-2] * 8, [0] * 8])
    assert searched(vectors, book[None], 1)[:, 0].tolist() == [0, 2, 0]


def test_vectors_stay_as_they_are(books):
    vectors = gaussian(30, 8, seed=4)
    before = vectors.copy()
    for width in (1, 4):
        searched(vectors, books, width)
    assert_array_equal(vectors, before)


@pytest.mark.parametrize("width", [*WIDTHS, 48])
def test_memory_is_what_is_reckoned_with(books, width):
    vectors = torch.from_numpy(gaussian(600, 8, seed=5))
    tables = TorchGreedy.of(books, CPU) if width == 1 else TorchBeam.of(books, width, CPU)
    with PeakMemory() as memory:
        tables.search(vectors)
    constant = 1 << 17  # the columns in f64, numbers of buckets
    print(f"{memory.most / len(vectors):.0f} bytes a vector, reckoned {tables.bytes_per_vector}")
    assert memory.most <= tables.bytes_per_vector * len(vectors) + constant
    assert memory.most > tables.bytes_per_vector * len(vectors) / 3
