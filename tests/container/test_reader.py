from __future__ import annotations

import dataclasses
import json
import os
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import FormatError, IntegrityError, MoedockError
from container.layout import CODEBOOKS_NAME, EXPERT_QUANTS, TRUNK_NAME, VQ3R, bank_name
from container.manifest import Manifest
from container.model import KINDS, ModelConfig
from container.reader import ContainerReader
from container.records import ExpertRecord, RecordLayout
from container.trunk import unpack_rows
from tests import strategies
from tests.container.small import (
    BASE,
    LAYER,
    TRUNK,
    random_record,
    read_everything,
    small_config,
    small_files,
    write_files,
)

MANIFEST, FILES = small_files()
BANK = bank_name(LAYER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path, FILES)


@pytest.mark.parametrize("quant", list(EXPERT_QUANTS.values()), ids=lambda quant: quant.fmt.name)
def test_a_container_is_read_whole(tmp_path, quant):
    manifest, files = small_files(quant)
    found = read_everything(write_files(tmp_path, files))
    assert set(TRUNK) <= set(found)
    layout = RecordLayout(quant, ModelConfig.from_config(manifest.config).expert_shapes)
    for expert in range(2):
        data = files[BANK][expert * layout.stride_bytes :][: layout.stride_bytes]
        record = ExpertRecord.unpack(data, layout, layer=LAYER, expert=expert, codebook_base=BASE)
        for kind in KINDS:
            np.testing.assert_array_equal(found[f"{LAYER} {expert} {kind} indices"], record.indices[kind])
    books = found[f"codebooks {LAYER}"]
    assert books.shape == (3, quant.n_stages, quant.n_entries, 8)
    # codebook id = base + kind · stages + stage, records in id order
    size = 16 + quant.n_entries * 16
    raw = np.frombuffer(files[CODEBOOKS_NAME][(BASE + 2 * quant.n_stages + 1) * size + 16 :][: size - 16], dtype="<f2")
    np.testing.assert_array_equal(books[2, 1].reshape(-1), raw)


def test_rows_of_the_trunk(folder):
    with ContainerReader.open(folder) as reader:
        for name in TRUNK:
            entry = reader.entry(name)
            rows, data = entry.size.rows, reader.read_trunk(entry)
            assert data.tobytes() == FILES[TRUNK_NAME][entry.offset : entry.offset + entry.n_bytes]
            whole = unpack_rows(*reader.read_trunk_rows(entry, 0, rows), entry.shape[-1], entry.fmt)
            for row in range(rows):
                one = unpack_rows(*reader.read_trunk_rows(entry, row, row + 1), entry.shape[-1], entry.fmt)
                np.testing.assert_array_equal(one[0], whole[row])
            values, scales = reader.read_trunk_rows(entry, rows, rows)
            assert values.size == scales.size == 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 5), (5, 5), (3, 2)])
def test_rows_outside_a_tensor_are_refused(folder, start, stop):
    """Row 4 of 4 would be read from the scales, without a word, were it not checked."""
    with ContainerReader.open(folder) as reader, pytest.raises(ValueError, match=r"outside model.embed.* \(4 rows\)"):
        reader.read_trunk_rows(reader.entry("model.embed_tokens.weight"), start, stop)


@pytest.mark.parametrize(("start", "n"), [(-1, 1), (0, 1041), (1041, 0), (3, -1)])
def test_bytes_outside_a_tensor_are_refused(folder, start, n):
    with (
        ContainerReader.open(folder) as reader,
        pytest.raises(ValueError, match=r"outside model.embed.* \(1040 bytes\)"),
    ):
        reader.read_trunk_range(reader.entry("model.embed_tokens.weight"), start, n)


def test_names_with_and_without_the_prefix(tmp_path):
    trunk = tuple(dataclasses.replace(entry, name="language_model." + entry.name) for entry in MANIFEST.trunk)
    manifest = dataclasses.replace(MANIFEST, tensor_prefix="language_model.", trunk=trunk)
    write_files(tmp_path, FILES | {"manifest.json": manifest.to_bytes()})
    with ContainerReader.open(tmp_path) as reader:
        assert reader.entry("model.norm.weight") is reader.entry("language_model.model.norm.weight")
        with pytest.raises(FormatError, match=r"no tensor language_model\.x"):
            reader.entry("x")


def test_experts_and_layers_that_are_not_there(folder):
    with ContainerReader.open(folder) as reader:
        for expert in (-1, 2):
            with pytest.raises(FormatError, match=f"{BANK}: there is no expert {expert}"):
                reader.read_expert(LAYER, expert)
        with pytest.raises(FormatError, match="layer 0 has no expert bank"):
            reader.read_expert(0, 0)


def truncate(name: str, n_bytes: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(FILES[name][:n_bytes])


def extend(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(FILES[name] + b"\0")


def manifest_with(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "manifest.json").write_bytes(dataclasses.replace(MANIFEST, **changes).to_bytes())


def folder_at(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def fifo_at(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


BANK_ENTRY = MANIFEST.layers[LAYER]
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: no such file"),
    "manifest is a folder": (folder_at("manifest.json"), "manifest.json: no such file"),
    "no trunk": (lambda folder: (folder / TRUNK_NAME).unlink(), "trunk.bin: cannot be opened .No such file"),
    "no codebooks": (lambda folder: (folder / CODEBOOKS_NAME).unlink(), "codebooks.bin: cannot be opened"),
    "no bank": (lambda folder: (folder / BANK).unlink(), f"{BANK}: cannot be opened"),
    "trunk short": (truncate(TRUNK_NAME, -1), "trunk.bin: .* bytes expected, found"),
    "trunk long": (extend(TRUNK_NAME), "trunk.bin: .* bytes expected, found"),
    "codebooks short": (truncate(CODEBOOKS_NAME, -1), "codebooks.bin: .* bytes expected, found"),
    "codebooks empty": (truncate(CODEBOOKS_NAME, 0), "codebooks.bin: .* bytes expected, found 0"),
    "bank short": (truncate(BANK, -1), f"{BANK}: 8192 bytes expected, found 8191"),
    "bank short by a record": (truncate(BANK, 4096), f"{BANK}: 8192 bytes expected, found 4096"),
    "bank long": (extend(BANK), f"{BANK}: 8192 bytes expected, found 8193"),
    "bank is a folder": (folder_at(BANK), f"{BANK}: is not a regular file"),
    "trunk is a pipe": (fifo_at(TRUNK_NAME), "trunk.bin: is not a regular file"),
    "banks missing": (manifest_with(layers={}), r"differ in layers \[1\]"),
    "bank of a dense layer": (
        manifest_with(layers={0: dataclasses.replace(BANK_ENTRY, file="experts-L0.bin"), 1: BANK_ENTRY}),
        r"differ in layers \[0\]",
    ),
    "another number of experts": (
        manifest_with(layers={1: dataclasses.replace(BANK_ENTRY, n_experts=1)}),
        "gives layer 1 1 experts, its config needs 2",
    ),
    "another stride": (
        manifest_with(layers={1: dataclasses.replace(BANK_ENTRY, n_bytes=16384)}),
        "gives layer 1 8192 bytes per record, its config needs 4096",
    ),
    "codebook base beyond the file": (
        manifest_with(layers={1: dataclasses.replace(BANK_ENTRY, codebook_base=3)}, files={}),
        "codebooks.bin: at least 49344 bytes expected, found 45232",
    ),
    "config without a key": (manifest_with(config={}), "config: `num_hidden_layers` is missing"),
    "config with 10^12 layers": (manifest_with(config=small_config() | {"num_hidden_layers": 10**12}), "num_hidden"),
    "experts that are no whole vectors": (manifest_with(config=small_config(moe_intermediate_size=20)), "vectors of 8"),
}  # fmt: skip


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders_are_refused_and_leave_no_file_open(folder, name):
    change, message = BROKEN[name]
    change(folder)
    before = open_files()
    with pytest.raises(FormatError, match=message) as caught:
        ContainerReader.open(folder)
    assert str(folder) in str(caught.value)
    assert open_files() == before


def test_other_writers_containers_open_without_our_keys(folder):
    """v0 lacks `files`, `provenance` and `crc32`; then bytes after the last tensor mean nothing."""
    trunk = tuple(dataclasses.replace(entry, crc32=None) for entry in MANIFEST.trunk)
    raw = dataclasses.replace(MANIFEST, trunk=trunk).to_json()
    del raw["files"], raw["provenance"]
    (folder / "manifest.json").write_bytes(Manifest.from_json(raw).to_bytes())
    extend(TRUNK_NAME)(folder)
    extend(CODEBOOKS_NAME)(folder)
    assert len(read_everything(folder)) == 3 + 1 + 2 * 6


def test_a_record_in_the_wrong_place_is_refused(folder):
    data = FILES[BANK]
    (folder / BANK).write_bytes(data[4096:] + data[:4096])
    with ContainerReader.open(folder) as reader, pytest.raises(FormatError, match="layer 1 expert 0: expert is 0x1"):
        reader.read_expert(LAYER, 0)


def test_the_crc32_is_checked_on_request(folder):
    data = bytearray(FILES[BANK])
    data[4096 + 50] ^= 1
    (folder / BANK).write_bytes(data)
    with ContainerReader.open(folder) as reader:
        reader.read_expert(LAYER, 0, check_crc=True)
        reader.read_expert(LAYER, 1)
        with pytest.raises(IntegrityError, match=f"{BANK}: layer 1 expert 1: crc32"):
            reader.read_expert(LAYER, 1, check_crc=True)


def test_a_file_that_shrinks_while_open(folder):
    with ContainerReader.open(folder) as reader:
        os.truncate(folder / BANK, 5000)
        with pytest.raises(FormatError, match=f"{BANK}: the file ends before byte 8192"):
            reader.read_expert(LAYER, 1)


def test_one_expert_is_one_read_and_one_record_of_memory(tmp_path, monkeypatch):
    """A sparse bank of 4,096 experts and more than a gigabyte; its last record is read."""
    n_experts = 4096
    config = small_config(hidden_size=512, moe_intermediate_size=512, num_experts=n_experts)
    layout = RecordLayout(VQ3R, ModelConfig.from_config(config).expert_shapes)
    bank = dataclasses.replace(BANK_ENTRY, n_experts=n_experts, n_bytes=n_experts * layout.stride_bytes)
    assert bank.n_bytes > 1 << 30
    manifest = dataclasses.replace(MANIFEST, config=config, layers={LAYER: bank})
    write_files(tmp_path, FILES | {"manifest.json": manifest.to_bytes(), BANK: b""})
    last = random_record(np.random.default_rng(3), layout, LAYER, n_experts - 1, BASE)
    with (tmp_path / BANK).open("r+b") as file:
        file.seek((n_experts - 1) * layout.stride_bytes)
        file.write(last.pack(layout))
    reads: list[int] = []
    real_preadv = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return real_preadv(descriptor, buffers, offset)

    with ContainerReader.open(tmp_path) as reader:
        monkeypatch.setattr(os, "preadv", preadv)
        tracemalloc.start()
        try:
            record = reader.read_expert(LAYER, n_experts - 1, check_crc=True)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert reads == [(n_experts - 1) * layout.stride_bytes]
    assert layout.stride_bytes <= peak_bytes < layout.stride_bytes + 100_000
    np.testing.assert_array_equal(record.scales["down"], last.scales["down"])


def test_threads_share_a_reader(folder):
    wanted = read_everything(folder)
    start = threading.Barrier(4)
    with ContainerReader.open(folder) as reader, ThreadPoolExecutor(4) as pool:

        def read(thread: int) -> list[ExpertRecord]:
            start.wait(timeout=30)
            return [reader.read_expert(LAYER, (thread + n) % 2, check_crc=True) for n in range(200)]

        for records in pool.map(read, range(4)):
            for record in records:
                np.testing.assert_array_equal(record.scales["up"], wanted[f"{LAYER} {record.expert} up scales"])


def attempt(folder: Path) -> dict[str, Any] | MoedockError:
    """All numbers of a container or the error that refuses it; any other exception is a failure."""
    try:
        return read_everything(folder)
    except MoedockError as error:
        return error


@given(st.data(), st.sampled_from(sorted(FILES)))
def test_damage_gives_an_error_of_ours_or_the_right_numbers(folder, data, name):
    """Records are covered by their crc32; the other files need the manifest's checksums, and must not crash."""
    wanted = read_everything(write_files(folder, FILES))
    (folder / name).write_bytes(data.draw(strategies.damaged(FILES[name])))
    found = attempt(folder)
    if isinstance(found, MoedockError):
        assert str(folder) in str(found)
    elif name != "manifest.json":
        for key, numbers in found.items():
            assert numbers.shape == wanted[key].shape
            if name == BANK or (name == TRUNK_NAME and key not in TRUNK):
                np.testing.assert_array_equal(numbers, wanted[key])


@given(st.data())
def test_hostile_manifests_give_an_error_of_ours_or_are_read(folder, data):
    raw = data.draw(strategies.with_hostile_value(MANIFEST.to_json()))
    write_files(folder, FILES)
    (folder / "manifest.json").write_bytes(json.dumps(raw).encode())
    found = attempt(folder)
    assert isinstance(found, dict) or str(folder) in str(found)
