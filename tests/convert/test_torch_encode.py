"""The GPU's path, run on tensors of the processor: decoded to the bit, encoded as without it, containers that hold."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from container.errors import UsageError, WeightError
from container.layout import VQ2R, VQ3R, VQ4P, ExpertQuant
from container.shards import DTYPE_BITS, ShardTensor
from convert.__main__ import main as convert
from convert.codebooks import train_codebooks
from convert.device import (
    CONTEXT_BYTES,
    STREAMS,
    STRIP_BYTES_PER_WEIGHT,
    STRIP_WEIGHTS,
    TORCH_CPU,
    device_memory,
    is_device,
)
from convert.encode import EncodedRows, RowEncoder, make_encoder
from convert.encodings.mxfp4 import Mxfp4
from convert.encodings.plain import Plain
from convert.local_supply import LocalSupply
from convert.options import ConvertOptions
from convert.prepare import prepare
from convert.quality import Quality
from convert.source import RawRows, SourceTensor
from convert.timing import Timing
from convert.torch_decode import decode
from convert.torch_device import Device, device_named, device_problems
from convert.torch_encode import TorchEncoder
from tests.checkpoints import checkpoint_tensors
from tests.convert.peak_memory import PeakMemory
from tests.convert.small import (
    EXPERT,
    REPOSITORY,
    contents,
    convert_here,
    dry_run_here,
    serial_work,
    small_k3,
    write_small,
)
from validate.__main__ import main as validate

QUANTS = {quant.fmt.name: quant for quant in (VQ3R, VQ4P, VQ2R)}
W2 = EXPERT.format(layer=2, expert=1, matrix="w2")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def gaussian(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def plain(values: np.ndarray, dtype: str = "F32") -> tuple[SourceTensor, RawRows]:
    """A matrix as a source, and its bytes."""
    part = ShardTensor("w", dtype, values.shape, 0, values.size * DTYPE_BITS[dtype] // 8)
    return SourceTensor(None, "w", values.shape, Plain(), (part,)), (values.reshape(-1).view(np.uint8),)


def mxfp4(packed: np.ndarray, scales: np.ndarray) -> tuple[SourceTensor, RawRows]:
    """An MXFP4 matrix as a source, and its bytes."""
    parts = tuple(ShardTensor("w", "U8", part.shape, 0, part.size) for part in (packed, scales))
    shape = (len(packed), 2 * packed.shape[1])
    return SourceTensor(None, "w", shape, Mxfp4(), parts), (packed.reshape(-1), scales.reshape(-1))


def random_mxfp4(rows: int, cols: int, seed: int = 0) -> tuple[SourceTensor, RawRows]:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    return mxfp4(packed, rng.integers(118, 123, (rows, cols // 32), dtype=np.uint8))


def every_mxfp4() -> tuple[SourceTensor, RawRows]:
    """Every pair of values under every scale."""
    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    return mxfp4(packed, np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1))


EVERY_16_BITS = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
ODD_F32 = np.float32([[0.0, -0.0, 1e-45, -1e-40, 3.4028235e38, np.inf, -np.inf, np.nan]])
SOURCES = {
    "mxfp4": every_mxfp4(),
    "BF16": plain(EVERY_16_BITS, "BF16"),
    "F16": plain(EVERY_16_BITS, "F16"),
    "F32": plain(ODD_F32),
}


@pytest.mark.parametrize("name", SOURCES)
def test_decoding_is_the_processors_to_the_bit(name):
    source, raw = SOURCES[name]
    found, expected = decode(device_named(TORCH_CPU), source, raw).numpy(), source.decode(raw)
    assert_array_equal(np.isnan(found), np.isnan(expected))
    known = ~np.isnan(expected)
    assert_array_equal(found.view(np.uint32)[known], expected.view(np.uint32)[known])


def test_an_encoding_unknown_to_the_device_is_decoded_before():
    class Doubled(Plain):
        name = "doubled"

        def decode(self, raw, dtypes, rows, cols):
            return 2 * super().decode(raw, dtypes, rows, cols)

    known, raw = plain(gaussian(3, 32))
    source = SourceTensor(None, "w", known.shape, Doubled(), known.parts)
    assert_array_equal(decode(device_named(TORCH_CPU), source, raw).numpy(), 2 * gaussian(3, 32))


@pytest.fixture(scope="module", params=QUANTS)
def quant_books(request) -> tuple[ExpertQuant, np.ndarray]:
    quant = QUANTS[request.param]
    return quant, train_codebooks(gaussian(4096, 8, seed=1), quant, seed=0).astype(np.float32)


def both(quant: ExpertQuant, books: np.ndarray, beam_width: int) -> list[RowEncoder]:
    encoders = [make_encoder(books, quant, beam_width, device) for device in (TORCH_CPU, "cpu")]
    assert isinstance(encoders[0], TorchEncoder)
    assert not isinstance(encoders[1], TorchEncoder)
    return encoders


def odd_rows() -> tuple[SourceTensor, RawRows]:
    """70 rows of mixed size, some zero, some with outliers: a whole tile and a part of one."""
    rows = gaussian(70, 64, seed=2) * np.exp(4 * gaussian(70, 1, seed=3))
    rows[5] = rows[66] = 0
    rows[7, 3] = 1e20
    rows[9] *= 1e-44
    return plain(rows)


@pytest.mark.parametrize("beam_width", [1, 16])
@pytest.mark.parametrize("make", [odd_rows, lambda: random_mxfp4(130, 96)], ids=["odd", "mxfp4"])
def test_what_is_stored_is_what_the_processor_stores(quant_books, beam_width, make):
    source, raw = make()
    found, expected = (encoder.encode(source, raw, Timing()) for encoder in both(*quant_books, beam_width))
    assert isinstance(found, EncodedRows)
    assert (found.indices != expected.indices).mean() < 1e-3
    assert_allclose(found.scales.astype(np.float64), expected.scales.astype(np.float64), rtol=1e-3)
    assert_allclose(found.squared_errors, expected.squared_errors, rtol=1e-3)
    assert_allclose(found.squared_norms, expected.squared_norms, rtol=1e-6)
    assert np.abs(found.usage - expected.usage).sum() <= 2e-3 * expected.usage.sum()


@pytest.mark.parametrize(("row", "value"), [(0, np.nan), (40, np.inf), (69, -np.inf)])
def test_the_first_bad_row_is_told(row, value):
    rows = gaussian(70, 64)
    rows[row, 5] = value
    rows[69, 0] = np.nan
    source, raw = plain(rows)
    encoders = both(VQ3R, gaussian(3 * 256, 8).reshape(3, 256, 8), 1)
    assert [encoder.encode(source, raw, Timing()) for encoder in encoders] == [row, row]


def test_time_is_counted():
    timing = Timing()
    make_encoder(gaussian(768, 8).reshape(3, 256, 8), VQ3R, 1, TORCH_CPU).encode(*plain(gaussian(1, 32)), timing)
    assert timing.seconds["encode"] > 0


@pytest.mark.parametrize("name", ["mxfp4", "F32"])
def test_a_strip_takes_what_is_reckoned_with(name):
    source, raw = random_mxfp4(64, 1024) if name == "mxfp4" else plain(gaussian(64, 1024))
    encoder = TorchEncoder(gaussian(4 * 64, 8).reshape(4, 64, 8), VQ4P, 1, TORCH_CPU)
    search_bytes = 512 * encoder._tables.bytes_per_vector  # a 16th of the vectors at a time
    with pytest.MonkeyPatch.context() as patch, PeakMemory() as memory:
        patch.setattr("convert.torch_encode.SEARCH_BYTES", search_bytes)
        encoder.encode(source, raw, Timing())
    n_weights = 64 * 1024
    print(f"{memory.most / n_weights:.1f} bytes a weight")
    assert STRIP_BYTES_PER_WEIGHT * n_weights / 2 < memory.most < STRIP_BYTES_PER_WEIGHT * n_weights


def test_strips_are_whole_tiles_that_fit():
    encoder = TorchEncoder(gaussian(4 * 64, 8).reshape(4, 64, 8), VQ4P, 1, TORCH_CPU)
    assert encoder.strip_rows(3584) >= 3072  # K3's expert matrices go whole
    assert encoder.strip_rows(3072) >= 3584
    for cols in (8, 3584, 100_000, STRIP_WEIGHTS // 64):
        rows = encoder.strip_rows(cols)
        assert rows % 64 == 0
        assert 0 < rows * cols <= STRIP_WEIGHTS


def test_few_threads_have_a_turn_at_once():
    device, now, most = Device(TORCH_CPU), 0, 0
    lock, full = threading.Lock(), threading.Barrier(STREAMS)

    def work() -> None:
        nonlocal now, most
        with device.turn():
            with lock:
                now, most = now + 1, max(most, now + 1)
            time.sleep(0.05)  # long enough for more to come
            full.wait(timeout=10)  # as many as there are streams do run at once
            with lock:
                now -= 1

    threads = [threading.Thread(target=work) for _ in range(4 * STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (now, most) == (0, STREAMS)


def test_a_full_device_is_a_lack_of_memory():
    device = Device(TORCH_CPU)
    for _ in range(2 * STREAMS):  # a turn that failed gives its stream back
        with pytest.raises(MemoryError, match="CUDA out of memory"), device.turn():
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("name", ["cpu", "torch-cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices(name):
    assert is_device(name)


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda:1234", "cuda:²", "cuda:0\n"])
def test_no_devices(tmp_path, name):
    assert not is_device(name)
    with pytest.raises(UsageError, match="--device must be cpu, cuda or cuda:N"):
        ConvertOptions(source=tmp_path / "a", output=tmp_path / "b", device=name)


@pytest.fixture
def one_gpu(monkeypatch):
    """A CUDA device of 6 GiB, as far as questions about it go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (6 << 30, 8 << 30))


@pytest.mark.usefixtures("one_gpu")
def test_what_stands_against_a_gpu():
    assert CONTEXT_BYTES < device_memory() < 3 << 30
    assert device_problems("cuda", 2) == device_problems("cuda:0", 1) == []
    (problem,) = device_problems("cuda:1", 1)
    assert problem == "--device cuda:1: there are 1 CUDA devices, cuda:0 to cuda:0"
    (problem,) = device_problems("cuda:0", 3)
    assert problem.startswith("memory of cuda:0: 3 workers need ")
    assert "use fewer --workers" in problem


@without_cuda
def test_the_command_refuses_a_gpu_that_is_not_there(tmp_path, k3, capsys):
    """Before anything is written, in one line; the plan says it too."""
    assert convert([str(k3.source), str(tmp_path / "out"), "--device", "cuda"]) == 1
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert f"--device cuda: torch {torch.__version__} finds no CUDA device" in stderr
    assert "Traceback" not in stderr
    plan = dry_run_here(k3.source, tmp_path / "out", device="cuda:1")
    assert [problem for problem in plan["problems"] if problem.startswith("--device cuda:1: torch ")]
    assert list(tmp_path.iterdir()) == []


def test_the_command_refuses_an_unknown_device(tmp_path, k3, capsys):
    assert convert([str(k3.source), str(tmp_path / "out"), "--device", "tpu"]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("error: --device must be cpu, cuda or cuda:N, found ")


def test_a_gpu_gets_two_workers(tmp_path, k3):
    """However many cores there are; and threads enough for its streams."""
    options = ConvertOptions(source=k3.source, output=tmp_path / "out", device="cuda")
    prepared = prepare(options, LocalSupply(options))
    assert prepared.n_workers == 2
    assert prepared.threads_per_worker(1000) == STREAMS
    options = replace(options, workers=3)
    assert prepare(options, LocalSupply(options)).n_workers == 3


def test_without_a_gpu_torch_is_not_loaded():
    code = "import sys; import convert.run, convert.prepare, convert.describe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


@pytest.fixture(scope="module")
def containers(tmp_path_factory, k3):
    """The small K3 checkpoint converted by either path, with little training: device → (folder, summary)."""
    folder = tmp_path_factory.mktemp("devices")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convert.run.run_work", serial_work)
        patch.setattr("convert.codebooks.GREEDY_START", ((65_536, 2),))
        patch.setattr("convert.codebooks.JOINT", ((None, 2),))
        return {
            device: (folder / device, convert_here(k3.source, folder / device, device=device)[0])
            for device in ("cpu", TORCH_CPU)
        }


def test_the_container_is_the_processors_but_for_ties(containers, record_property):
    found, expected = (contents(containers[device][0]) for device in (TORCH_CPU, "cpu"))
    assert found.keys() == expected.keys()
    for name in ("experts-L1.bin", "experts-L2.bin", "codebooks.bin", "trunk.bin"):
        one, other = (np.frombuffer(files[name], dtype=np.uint8) for files in (found, expected))
        record_property(f"differing bytes of {name}", int((one != other).sum()))
        assert (one != other).mean() < 1e-2
    errors = [containers[device][1].relative_error for device in (TORCH_CPU, "cpu")]
    assert abs(errors[0] - errors[1]) < 1e-4
    assert b'"device": "torch-cpu"' in found["manifest.json"]


def test_the_container_validates(k3, containers, capsys):
    assert validate([str(containers[TORCH_CPU][0]), "--source", str(k3.source)]) == 0, capsys.readouterr()


@pytest.mark.usefixtures("in_this_process")
def test_a_build_goes_on_with_its_device_only(k3, tmp_path):
    convert_here(k3.source, tmp_path / "out", layers=frozenset({0}))
    with pytest.raises(Exception, match="device"):
        convert_here(k3.source, tmp_path / "out", device=TORCH_CPU)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("row", [3, 100])
def test_bad_weights_are_named_as_without_a_gpu(tmp_path, monkeypatch, row):
    """The first of several, in the words of the processor's path, in an expert that training did not draw."""
    monkeypatch.setattr("convert.experts.SAMPLE_EXPERTS", 1)
    assert np.random.default_rng([0, 2]).choice(4, 1, replace=False) != 1
    two_tiles = {"routed_expert_hidden_size": 128}
    tensors = checkpoint_tensors(small_k3(**two_tiles))
    for bad in (row, 120):
        tensors[f"{W2}_scale"][bad, -1] = 255
    source = write_small(tmp_path / "checkpoint", tensors, **two_tiles)
    messages = []
    for device in ("cpu", TORCH_CPU):
        with pytest.raises(WeightError) as refusal:
            convert_here(source, tmp_path / device, layers=frozenset({2}), device=device, quality=Quality.FAST)
        messages.append(str(refusal.value))
    assert f"tensor {W2}: row {row} holds NaN or infinity" in messages[0]
    assert messages[0] == messages[1]
