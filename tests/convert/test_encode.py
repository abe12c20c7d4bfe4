"""Encoding rows: greedy search and least-squares scales against f64 numpy, and what the stored bytes decode to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.indices import unpack_indices
from container.layout import VQ2R, VQ3R, VQ4P, ExpertQuant
from convert.beam import BeamTables
from convert.codebooks import train_codebooks
from convert.encode import MOST_SEARCHES_AGAIN, EncodedRows, Encoder, improve_odd_rows
from tests.convert import oracle

QUANTS = {quant.fmt.name: quant for quant in (VQ3R, VQ2R, VQ4P)}
F16_LARGEST, F16_SMALLEST = 65504.0, 2.0**-24


def gaussian(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


@pytest.fixture(scope="module", params=QUANTS)
def quant_books(request) -> tuple[ExpertQuant, np.ndarray]:
    """Each expert format with codebooks trained on Gaussian vectors."""
    quant = QUANTS[request.param]
    return quant, train_codebooks(gaussian(4096, 8, seed=1), quant, seed=0)


def encode(rows: np.ndarray, quant: ExpertQuant, books: np.ndarray, beam_width: int = 1) -> EncodedRows:
    encoded = Encoder(books.astype(np.float32), quant, beam_width).encode_rows(rows.copy())
    assert isinstance(encoded, EncodedRows)
    return encoded


def decoded(encoded: EncodedRows, rows: np.ndarray, quant: ExpertQuant, books: np.ndarray) -> np.ndarray:
    return oracle.decode(encoded.indices, encoded.scales, books, rows.shape, quant)


def test_codes_are_the_greedy_ones(quant_books):
    quant, books = quant_books
    rows = gaussian(9, 512, seed=2) * np.exp(gaussian(9, 1, seed=3))  # too long to be odd by chance
    encoded = encode(rows, quant, books)
    codes = unpack_indices(encoded.indices, rows.shape, quant).reshape(-1, quant.n_stages)
    expected, _ = oracle.greedy(oracle.scaled(rows)[0].reshape(-1, 8), books)
    assert (codes == expected).all(axis=1).mean() > 0.995  # all but ties


def test_codes_are_those_of_the_beam(quant_books):
    quant, books = quant_books
    rows = gaussian(3, 512, seed=2) * np.exp(gaussian(3, 1, seed=3))
    codes = unpack_indices(encode(rows, quant, books, beam_width=6).indices, rows.shape, quant)
    vectors = oracle.scaled(rows)[0].astype(np.float32).reshape(-1, 8)
    expected = oracle.bucketed_beam(vectors, BeamTables.of(books.astype(np.float32)), 6)
    assert (codes.reshape(expected.shape) == expected).all(axis=1).mean() > 0.95  # all but the ties of short costs


def test_the_scale_is_the_least_squares_optimum(quant_books):
    """No neighbour of a stored f16 scale gives less error."""
    quant, books = quant_books
    rows = gaussian(65, 128, seed=4) * np.exp(2 * gaussian(65, 1, seed=5))
    encoded = encode(rows, quant, books)
    unit = oracle.decode(encoded.indices, np.ones(len(rows), np.float16), books, rows.shape, quant)

    def row_errors(scales: np.ndarray) -> np.ndarray:
        return np.square(unit * scales.astype(np.float64)[:, None] - rows).sum(axis=1)

    best = row_errors(encoded.scales)
    for direction in (np.float16(0), np.float16(F16_LARGEST)):
        assert (best <= row_errors(np.nextafter(encoded.scales, direction)) * (1 + 1e-5)).all()
    fitted = (unit * rows).sum(axis=1) / np.square(unit).sum(axis=1)
    assert np.abs(encoded.scales.astype(np.float64) / fitted - 1).max() < 2**-11 + 1e-6


@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 30.0, 1e-6, 1e-30, 1e-44, 1e6, 1e30, 1e38])
def test_the_reported_error_is_that_of_the_stored_bytes(quant_books, magnitude):
    quant, books = quant_books
    rows = (gaussian(20, 64, seed=6) / 5 * np.float64(magnitude)).astype(np.float32)
    encoded = encode(rows, quant, books)
    norm = float(np.square(rows, dtype=np.float64).sum())
    error = oracle.squared_error(decoded(encoded, rows, quant, books), rows)
    assert encoded.squared_norms.sum() == pytest.approx(norm, rel=1e-6)
    assert encoded.squared_errors.sum() == pytest.approx(error, rel=1e-5, abs=1e-6 * norm)


def test_scales_stay_finite_and_positive_at_any_magnitude(quant_books):
    """Rows from the smallest subnormal to the largest f32, one non-zero weight among zeros included."""
    quant, books = quant_books
    magnitudes = np.float32([1e-45, 1e-40, 1e-30, 1e-8, 1e-5, 1, 6e4, 1e5, 1e30, 1e38, 3.4028235e38])
    dense = np.abs(gaussian(len(magnitudes), 64, seed=7)).clip(0.1, 1) * magnitudes[:, None].astype(np.float64)
    sparse = np.zeros((len(magnitudes), 64), dtype=np.float32)
    sparse[:, 5] = magnitudes
    rows = np.concatenate([dense.astype(np.float32), sparse])
    rows[0] = 1e-45
    scales = encode(rows, quant, books).scales
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    assert scales[[3, 4, 5]].astype(np.float64) == pytest.approx(oracle.scaled(rows)[1][[3, 4, 5]], rel=0.5, abs=6e-8)
    assert (scales[[8, 9, 10, 19, 20, 21]] == F16_LARGEST).all()
    assert (scales[[0, 1, 2, 11, 12, 13]] == F16_SMALLEST).all()


def test_a_zero_row_decodes_to_zeros(quant_books):
    quant, books = quant_books
    rows = gaussian(3, 32, seed=8)
    rows[1] = 0
    encoded = encode(rows, quant, books)
    assert encoded.scales[1] == 0
    assert not decoded(encoded, rows, quant, books)[1].any()
    assert encode(np.zeros((2, 32), np.float32), quant, books).squared_errors.sum() == 0


def test_mixed_magnitudes_in_one_matrix(quant_books):
    """A row's encoding depends on nothing but the row."""
    quant, books = quant_books
    rows = gaussian(6, 64, seed=9) * np.float32([[1e-3], [1e3], [0], [1], [1e-12], [1e12]])
    whole = encode(rows, quant, books)
    codes = unpack_indices(whole.indices, rows.shape, quant)
    for row in range(len(rows)):
        alone = encode(rows[row : row + 1], quant, books)
        assert alone.scales[0] == whole.scales[row]
        assert (unpack_indices(alone.indices, (1, 64), quant)[0] == codes[row]).all()


@given(factor=st.integers(-100, 100), seed=st.integers(0, 50))
def test_powers_of_two_change_only_the_scale(factor, seed):
    rows = gaussian(2, 16, seed=seed)
    books = np.random.default_rng(seed).standard_normal((3, 256, 8)).astype(np.float16)
    first = encode(rows, VQ3R, books)
    second = encode(np.ldexp(rows, factor), VQ3R, books)
    assert (first.indices == second.indices).all()
    wanted = np.clip(np.ldexp(first.scales.astype(np.float64), factor), F16_SMALLEST, F16_LARGEST)
    assert second.scales.astype(np.float64) == pytest.approx(wanted, rel=2**-9, abs=F16_SMALLEST)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_row_is_numbered(value):
    rows = gaussian(5, 16)
    rows[3, 2] = value
    books = np.zeros((3, 256, 8), dtype=np.float32)
    assert Encoder(books, VQ3R, beam_width=1).encode_rows(rows) == 3


def test_books_that_fit_nothing_are_survived():
    """All-zero codebooks decode to zeros: no division by zero, no NaN, a scale above 0."""
    rows = gaussian(3, 16)
    books = np.zeros((3, 256, 8), dtype=np.float16)
    encoded = encode(rows, VQ3R, books)
    assert np.isfinite(encoded.scales).all()
    assert (encoded.scales > 0).all()
    assert encoded.squared_errors.sum() == pytest.approx(encoded.squared_norms.sum())


@pytest.mark.parametrize(("found", "is_better"), [(0.9, False), (1.0, False), (1.2, True)])
def test_odd_rows_keep_the_better_of_two_searches(found, is_better):
    """Row 1 comes out at twice its row scale. What half of it decodes to explains `found` of its norm of 1.25."""
    codes, sums, scales = (
        np.zeros((3, 1, 3), np.uint8),
        np.float64([[1, 1, 1.1], [2, 1, 5], [0, 0, 1]]),
        np.full(3, 3.0),
    )
    calls = []

    def search_again(numbers, divisors):
        calls.append((numbers.tolist(), divisors.tolist()))
        return np.ones((1, 1, 3), np.uint8), np.float64([[found, found, 1.25]])

    improve_odd_rows(codes, sums, scales, search_again)
    assert calls == [([1], [2.0])] * (2 if is_better else 1)  # a second time in vain
    wanted = (1, [1.2, 1.2, 1.25], 6) if is_better else (0, [2, 1, 5], 3)
    assert (codes[1, 0, 0], sums[1].tolist(), scales[1]) == wanted
    assert (codes[[0, 2]] == 0).all()
    assert sums[[0, 2]].tolist() == [[1, 1, 1.1], [0, 0, 1]]
    assert scales[[0, 2]].tolist() == [3, 3]


def test_searching_again_ends():
    """However long it helps."""
    n_calls = 0

    def search_again(numbers, divisors):
        nonlocal n_calls
        n_calls += 1
        return np.zeros((1, 1, 3), np.uint8), np.float64([[1, 0.9, 1.2]]) / divisors[:, None] ** 2 * 0.5**n_calls

    improve_odd_rows(np.zeros((1, 1, 3), np.uint8), np.float64([[1, 0.9, 1.2]]), np.ones(1), search_again)
    assert n_calls == MOST_SEARCHES_AGAIN
