"""Trunk tensors as the models get them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from container.errors import FormatError, IntegrityError
from container.layout import TrunkFormat
from container.reader import ContainerReader
from container.trunk import unpack_rows
from runtime import trunk as trunk_module
from runtime.compute.team import Team
from runtime.trunk import Trunk, dimensions
from tests.containers import build_container, kimi_linear_config
from tests.runtime.files import direct_files

EMBEDDING = "model.embed_tokens.weight"


@contextmanager
def opened(folder: Path, *, verify: bool = False) -> Iterator[tuple[ContainerReader, Trunk]]:
    with ContainerReader.open(folder) as reader, direct_files(folder) as files, closing(Team(1)) as team:
        trunk = Trunk(reader, files, team=team, verify=verify)
        trunk.load()
        yield reader, trunk


def dense(reader: ContainerReader, name: str) -> np.ndarray:
    entry = reader.entry(name)
    return unpack_rows(*reader.read_trunk_rows(entry, 0, entry.size.rows), entry.shape[-1], entry.fmt)


@pytest.mark.parametrize(("bits", "fmt"), [(4, TrunkFormat.Q4G), (8, TrunkFormat.Q8G), (32, TrunkFormat.F32)])
def test_a_matrix_is_what_the_file_says(tmp_path: Path, bits: int, fmt: TrunkFormat) -> None:
    folder = build_container(tmp_path, kimi_linear_config(num_hidden_layers=2), trunk_bits=bits)
    name = "model.layers.0.mlp.down_proj.weight"
    with opened(folder) as (reader, trunk):
        matrix = trunk.matrix(name)
        assert (matrix.rows, matrix.cols, matrix.fmt) == (256, 512, fmt)
        expected = dense(reader, name)
        unit = np.zeros(512, np.float32)
        unit[301] = 1
        np.testing.assert_array_equal(matrix(unit[None])[0], expected[:, 301])
        np.testing.assert_array_equal(trunk.array(name), expected)
        # as stored: values and scales are where the file was read to, nothing was copied
        assert np.shares_memory(matrix.values, trunk.matrix(name).values)
        assert matrix.scales.dtype == np.float16


def test_an_embedding_row_costs_one_row_of_reading(kimi_linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(kimi_linear) as (reader, trunk):
        expected, embedding = dense(reader, EMBEDDING), trunk.embedding(EMBEDDING)
        read_bytes = []
        read = trunk_module.DirectFiles.read_into
        monkeypatch.setattr(
            trunk_module.DirectFiles,
            "read_into",
            lambda self, name, target, offset: read_bytes.append(len(target)) or read(self, name, target, offset),
        )
        ids = [639, 0, 17, 17, 0]
        np.testing.assert_array_equal(embedding.rows(ids), expected[ids])
        assert sum(read_bytes) == 3 * (256 + 2 * 2)  # of each distinct row 8-bit values and one f16 scale per group


def test_a_damaged_embedding_is_found_though_it_stays_on_disk(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trunk_module, "_CRC_CHUNK_BYTES", 10_000)  # several pieces, the last one shorter
    folder = build_container(tmp_path, kimi_linear_config(num_hidden_layers=2))
    with opened(folder, verify=True) as (reader, trunk):
        trunk.embedding(EMBEDDING)
        entry = reader.entry(EMBEDDING)
        assert entry.crc32 == zlib.crc32(reader.read_trunk(entry).data)
        assert entry.n_bytes % 10_000
    with (folder / "trunk.bin").open("r+b") as file:
        file.seek(entry.offset + entry.n_bytes - 1)
        last = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
    with opened(folder, verify=True) as (_, trunk), pytest.raises(IntegrityError, match="embed_tokens"):
        trunk.embedding(EMBEDDING)
    with opened(folder) as (_, trunk):
        trunk.embedding(EMBEDDING)


def test_what_is_missing_or_misshapen_is_named_at_once(kimi_linear: Path) -> None:
    with opened(kimi_linear) as (_, trunk), pytest.raises(FormatError) as refused:
        trunk.require(dimensions({EMBEDDING: (640, 256), "model.norm.weight": (255,), "model.other.weight": (3, 4)}))
    assert "needs 2 tensor(s)" in str(refused.value)
    assert "model.norm.weight has shape [256], expected [255]" in str(refused.value)
    assert "model.other.weight is missing (expected [3, 4])" in str(refused.value)
