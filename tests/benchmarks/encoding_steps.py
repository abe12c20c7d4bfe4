"""What each step of the encoding gains, on row-scaled MXFP4 vectors that no training has seen (docs/encoding.md).

The table's errors are those of the scaled vectors; channel scales, fitted afterwards, take off a little more. Run as
`python -m tests.benchmarks.encoding_steps`; about three minutes on two cores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from container.layout import VQ2R, VQ3R, VQ4P, ExpertQuant
from container.machine import available_cores
from convert.codebooks import initial_codebooks, refined_codebooks
from convert.encode import Encoder
from convert.kernels import scale_rows
from convert.quality import Quality
from convert.threads import worker_threads
from tests.checkpoints import pack_mxfp4, unpack_mxfp4

COLS = 3584
N_FRESH = 131_072
CHUNK = 16_384


def main() -> None:
    with worker_threads(available_cores()) as threads:
        sample, fresh = mxfp4_vectors(1_048_576, seed=1), mxfp4_vectors(N_FRESH, seed=2)
        print("| format | codebooks | search | relative error | M weights/s, one thread |\n|---|---|---|---:|---:|")
        for quant, trained, books, width in steps(sample, threads):
            encoder = Encoder(books.astype(np.float32), quant, width)
            search = "greedy" if width == 1 else f"beam of {width}"
            print(
                f"| {quant.fmt.name} | {trained} | {search} | {100 * relative_error(encoder, fresh, threads):.2f} % | "
                f"{speed(encoder, fresh):.1f} |",
                flush=True,
            )


def steps(sample: np.ndarray, threads: ThreadPoolExecutor) -> Iterator[tuple[ExpertQuant, str, np.ndarray, int]]:
    """Format, how the codebooks were made, the codebooks, and the width of the beam they are searched with."""
    start = initial_codebooks(sample, VQ3R, seed=0)
    yield VQ3R, "k-means, stage by stage", start, 1
    greedy = refined_codebooks(sample[: Quality.FAST.effort(VQ3R).sample_vectors], start, VQ3R, 1, threads.map)
    yield VQ3R, "+ greedy rounds (`fast`)", greedy, 1
    for width in (2, 4, 8, 16, 48):
        yield VQ3R, "the same", greedy, width
    for n_vectors in (131_072, 524_288, 1_048_576):
        books = refined_codebooks(sample[:n_vectors], start, VQ3R, 8, threads.map)
        yield VQ3R, f"joint, for a beam of 8, on {n_vectors:,} vectors", books, 8
    for quality in (Quality.BALANCED, Quality.BEST):
        for quant in (VQ3R, VQ4P, VQ2R):
            effort = quality.effort(quant)
            begun = initial_codebooks(sample, quant, seed=0)
            books = refined_codebooks(sample[: effort.sample_vectors], begun, quant, effort.training_width, threads.map)
            yield quant, f"joint (`{quality.value}`)", books, effort.beam_width


def mxfp4_vectors(n: int, *, seed: int) -> np.ndarray:
    """Row-scaled vectors [n, 8] in random order, of Gaussian rows stored as MXFP4."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((n * 8 // COLS + 1, COLS), dtype=np.float32)
    rows = unpack_mxfp4(*pack_mxfp4(rows))
    scale_rows(rows, np.empty(len(rows)))
    vectors = rows.reshape(-1, 8)
    return vectors[random.permutation(len(vectors))[:n]]


def relative_error(encoder: Encoder, vectors: np.ndarray, threads: ThreadPoolExecutor) -> float:
    def squared(part: np.ndarray) -> float:
        codes = encoder.search(part)
        decoded = sum(book[codes[:, stage]] for stage, book in enumerate(encoder.entries))
        return float(np.square(part - decoded, dtype=np.float64).sum())

    parts = [vectors[at : at + CHUNK] for at in range(0, len(vectors), CHUNK)]
    return float((sum(threads.map(squared, parts)) / np.square(vectors, dtype=np.float64).sum()) ** 0.5)


def speed(encoder: Encoder, vectors: np.ndarray) -> float:
    """The search alone, in millions of weights per second of the thread's own time; the best of three."""
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        encoder.search(vectors[:CHUNK])
        seconds.append(time.thread_time() - start)
    return vectors[:CHUNK].size / min(seconds) / 1e6


if __name__ == "__main__":
    main()
