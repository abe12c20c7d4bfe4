"""Training codebooks, by properties: k-means differs by machine, so no trained value is pinned."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest

from container.layout import VQ2R, VQ3R, VQ4P
from convert import codebooks
from convert.beam import BeamTables, beam_search
from convert.codebooks import train_codebooks
from tests.convert import oracle
from tests.convert.small import REPOSITORY

QUANTS = [VQ3R, VQ2R, VQ4P]


def gaussian(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 8), dtype=np.float32)


def error(vectors: np.ndarray, books: np.ndarray) -> float:
    """Mean squared residual of greedy encoding."""
    return float(np.square(oracle.greedy(vectors, books)[1]).sum(axis=1).mean())


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.fmt.name)
def test_shape_and_range(quant):
    books = train_codebooks(gaussian(2000), quant, seed=0)
    assert books.shape == (quant.n_stages, quant.n_entries, 8)
    assert books.dtype == np.float16
    assert np.isfinite(books).all()


def test_the_seed_decides():
    vectors = gaussian(1500)
    first = train_codebooks(vectors, VQ3R, seed=1)
    assert first.tobytes() == train_codebooks(vectors, VQ3R, seed=1).tobytes()
    assert first.tobytes() != train_codebooks(vectors, VQ3R, seed=2).tobytes()


def test_the_vectors_stay_as_they_are():
    vectors = gaussian(600)
    before = vectors.copy()
    train_codebooks(vectors, VQ2R, seed=0)
    assert (vectors == before).all()


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257])
def test_few_vectors_are_kept_exactly(n):
    """Up to one vector per entry nothing is lost but the rounding of entries to f16."""
    vectors = gaussian(n)
    assert error(vectors, train_codebooks(vectors, VQ3R, seed=0)) < (1e-5 if n <= 256 else 1e-2)


def test_all_zero_vectors():
    books = train_codebooks(np.zeros((1000, 8), dtype=np.float32), VQ3R, seed=0)
    assert not books.any()


def test_constant_vectors():
    vectors = np.tile(np.float32([0.1, -0.2, 0.3, 1, 2, 3, -4, 0.05]), (1000, 1))
    books = train_codebooks(vectors, VQ3R, seed=0)
    assert np.isfinite(books).all()
    assert error(vectors, books) < 1e-6


def test_no_entry_is_subnormal():
    """Some readers take subnormal entries for zero; these vectors would train many."""
    vectors = gaussian(3000) * np.float32(3e-4)
    books = train_codebooks(vectors, VQ3R, seed=0)
    assert books.any()
    assert not ((books != 0) & (np.abs(books) < np.finfo(np.float16).smallest_normal)).any()


def test_duplicates():
    """Fewer distinct vectors than entries."""
    vectors = np.tile(gaussian(50), (40, 1))
    books = train_codebooks(vectors, VQ3R, seed=0)
    assert np.isfinite(books).all()
    assert error(vectors, books) < 1e-4


def test_a_single_outlier_is_survived():
    vectors = gaussian(2000)
    vectors[7] = 60  # the most that a row of 3584 scaled to size 1 can hold
    books = train_codebooks(vectors, VQ3R, seed=0)
    assert np.isfinite(books).all()
    assert error(vectors, books) < 1.0


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.fmt.name)
def test_better_than_plain_k_means(quant):
    vectors = gaussian(2500, seed=3)
    books, residual = [], vectors.astype(np.float64)
    for stage in range(quant.n_stages):
        book = oracle.plain_k_means(residual.astype(np.float32), quant.n_entries, rounds=6, seed=stage)
        residual = residual - book[oracle.squared_distances(residual, book).argmin(axis=1)]
        books.append(book.astype(np.float16))
    assert error(vectors, train_codebooks(vectors, quant, seed=0)) < error(vectors, np.stack(books))


def test_refinement_pays(monkeypatch):
    vectors = gaussian(20_000)
    refined = error(vectors[:2000], train_codebooks(vectors, VQ3R, seed=0))
    monkeypatch.setattr("convert.codebooks.GREEDY_ALONE", ())
    assert refined < 0.98 * error(vectors[:2000], train_codebooks(vectors, VQ3R, seed=0))


def test_the_error_holds_on_vectors_not_seen():
    """About 19 % on Gaussian weights, with a quarter of the sample that a real layer gives."""
    books = train_codebooks(gaussian(60_000), VQ3R, seed=0)
    fresh = gaussian(3000, seed=9)
    assert (error(fresh, books) / np.square(fresh).sum(axis=1).mean()) ** 0.5 < 0.195


@pytest.mark.parametrize("n", [1500, 70_000])
def test_threads_do_not_matter(n):
    vectors = gaussian(n)
    try:
        faiss.omp_set_num_threads(1)
        one = train_codebooks(vectors, VQ2R, seed=0)
        faiss.omp_set_num_threads(2)
        two = train_codebooks(vectors, VQ2R, seed=0)
    finally:
        faiss.omp_set_num_threads(1)
    assert one.tobytes() == two.tobytes()


def test_training_is_quiet():
    """faiss warns about small samples on stdout and stderr; a conversion's output is for results."""
    code = (
        "import numpy as np; from container.layout import VQ3R; from convert.codebooks import train_codebooks;"
        "train_codebooks(np.random.default_rng(0).standard_normal((300, 8), dtype=np.float32), VQ3R, seed=0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_vectors_that_judge_are_never_trained_on(monkeypatch):
    """Else training would stop as soon as it has learnt them by heart."""
    seen, judged = [], []

    def spy(name, record):
        original = getattr(codebooks, name)
        monkeypatch.setattr(
            codebooks, name, lambda vectors, *rest, **more: (record(vectors), original(vectors, *rest, **more))[1]
        )

    spy("_k_means", lambda vectors: seen.append(vectors.copy()))
    spy("_round", seen.append)
    spy("_squared_error", judged.append)
    train_codebooks(gaussian(20_000), VQ2R, seed=0, beam_width=4)
    assert len(judged) > 2
    judges = {row.tobytes() for row in judged[0]}
    assert len(judges) == 2500
    first_stage, *rounds = (vectors for vectors in seen if len(vectors) == 17_500)
    for vectors in (first_stage, *rounds):
        assert not judges & {row.tobytes() for row in vectors}


def beam_error(vectors: np.ndarray, books: np.ndarray, width: int = 4) -> float:
    """Mean squared residual of a beam search."""
    wide = books.astype(np.float32)
    codes = beam_search(vectors, BeamTables.of(wide), width)
    return float(np.square(vectors - oracle.sum_of_entries(codes, wide)).sum(axis=1).mean())


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.fmt.name)
def test_books_trained_with_a_beam_serve_it_better(quant):
    """On vectors not seen, than books trained for greedy search; those serve greedy search better."""
    vectors, fresh = gaussian(20_000, seed=4), gaussian(2000, seed=5)
    greedy, joint = (train_codebooks(vectors, quant, seed=0, beam_width=width) for width in (1, 16))
    gain = 1 - beam_error(fresh, joint, 16) / beam_error(fresh, greedy, 16)
    assert gain > (0.01 if quant.n_stages == 2 else 0.03)
    assert error(fresh, greedy) < error(fresh, joint)


SAMPLES = {
    "one": gaussian(1),
    "as many as entries": gaussian(256),
    "zeros": np.zeros((1000, 8), dtype=np.float32),
    "one vector": np.tile(np.float32([0.1, -0.2, 0.3, 1, 2, 3, -4, 0.05]), (1000, 1)),
    "duplicates": np.tile(gaussian(50), (40, 1)),
    "outlier": np.concatenate([gaussian(1999), np.full((1, 8), 60, dtype=np.float32)]),
    "tiny": gaussian(3000) * np.float32(3e-4),
}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.fmt.name)
def test_a_beam_trains_on_anything(quant, sample):
    """It may leave no more than greedy training does, and stores no entry that is subnormal or not finite."""
    vectors = SAMPLES[sample]
    before = vectors.copy()
    greedy, joint = (train_codebooks(vectors, quant, seed=0, beam_width=width) for width in (1, 4))
    assert (vectors == before).all()
    assert np.isfinite(joint).all()
    assert not ((joint != 0) & (np.abs(joint) < np.finfo(np.float16).smallest_normal)).any()
    assert beam_error(vectors, joint) <= error(vectors, greedy) * 1.02 + 1e-5


def test_threads_do_not_matter_to_beam_training():
    vectors = gaussian(40_000)
    alone = train_codebooks(vectors, VQ4P, seed=0, beam_width=3)
    with ThreadPoolExecutor(3) as threads:
        together = train_codebooks(vectors, VQ4P, seed=0, beam_width=3, parallel=threads.map)
    assert alone.tobytes() == together.tobytes()
    assert alone.tobytes() != train_codebooks(vectors, VQ4P, seed=1, beam_width=3).tobytes()
