"""On a real GPU: the processor's codes but for ties, the processor's containers, and how fast. Needs CUDA."""

from __future__ import annotations

import io
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from container.layout import VQ2R, VQ3R, VQ4P
from convert.codebooks import train_codebooks
from convert.device import CPU, STREAMS, device_memory
from convert.encode import make_encoder
from convert.kernels import scale_rows
from convert.options import ConvertOptions
from convert.quality import Quality
from convert.run import convert
from convert.timing import Timing
from convert.torch_decode import decode
from convert.torch_device import device_named
from tests.convert.small import contents, convert_here
from tests.convert.test_torch_encode import SOURCES, random_mxfp4

CUDA = "cuda"
QUANTS = {quant.fmt.name: quant for quant in (VQ3R, VQ4P, VQ2R)}
K3_MATRIX = (3072, 3584)
N_COMPARED = 200_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    source, raw = random_mxfp4(512, 3584)
    rows = source.decode(raw)
    assert scale_rows(rows, np.empty(len(rows))) == -1
    return rows.reshape(-1, 8)


@pytest.fixture(scope="module", params=QUANTS)
def quant_books(request, vectors):
    quant = QUANTS[request.param]
    return quant, train_codebooks(vectors[:16_384], quant, seed=0).astype(np.float32)


@pytest.mark.parametrize("width", [1, 16, 48])
def test_codes_are_the_processors_but_for_ties(quant_books, vectors, width):
    quant, books = quant_books
    found, expected = (make_encoder(books, quant, width, device).search(vectors[:N_COMPARED]) for device in (CUDA, CPU))
    different = (found != expected).any(axis=1)
    print(f"{quant.fmt.name}, width {width}: {different.sum()} of {len(different)} vectors differ")
    assert different.mean() < 1e-3


@pytest.mark.parametrize("name", SOURCES)
def test_decoding_is_the_processors_to_the_bit(name):
    source, raw = SOURCES[name]
    device = device_named(CUDA)
    with device.turn():
        found = decode(device, source, raw).cpu().numpy()
    expected = source.decode(raw)
    known = ~np.isnan(expected)
    assert np.isnan(found[~known]).all()
    assert (found.view(np.uint32)[known] == expected.view(np.uint32)[known]).all()


@pytest.mark.parametrize("quality", Quality)
def test_speed_and_memory_at_k3_shape(quant_books, quality):
    """Matrices of K3 experts, two at a time as in a conversion; reading them is not counted."""
    quant, books = quant_books
    encoder = make_encoder(books, quant, quality.effort(quant).beam_width, CUDA)
    source, raw = random_mxfp4(*K3_MATRIX)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with ThreadPoolExecutor(STREAMS) as threads:
        for n_times in (STREAMS, 4 * STREAMS):  # the first only to warm up
            start = time.perf_counter()
            assert all(threads.map(lambda _: encoder.encode(source, raw, Timing()) is not None, range(n_times)))
            speed = n_times * K3_MATRIX[0] * K3_MATRIX[1] / (time.perf_counter() - start)
    peak = torch.cuda.max_memory_reserved()
    print(f"{quant.fmt.name}, {quality.value}: {speed / 1e6:.0f} M weights/s, {peak / 2**20:.0f} MiB of the GPU")
    assert peak < device_memory()


def test_a_conversion_gives_the_processors_container(tmp_path, k3):
    """With two workers, each with a context on the GPU."""
    summary, _ = convert_here(k3.source, tmp_path / "out", device=CUDA)
    found = contents(tmp_path / "out")
    assert summary.complete
    for name in ("experts-L1.bin", "experts-L2.bin", "codebooks.bin", "trunk.bin"):
        one, other = (np.frombuffer(files[name], dtype=np.uint8) for files in (found, k3.files))
        print(f"{name}: {(one != other).sum()} of {one.size} bytes differ")
        assert (one != other).mean() < 1e-2
    assert abs(summary.relative_error - k3.summary.relative_error) < 1e-4


def test_a_device_number_is_taken(tmp_path, k3):
    options = ConvertOptions(source=k3.source, output=tmp_path / "out", device="cuda:0", layers=frozenset({1}))
    assert convert(options, io.StringIO()).n_jobs_done == 1
