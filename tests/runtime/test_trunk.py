"""Trunk tensors as the runtime reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from container.layout import TrunkFormat
from container.reader import ContainerReader
from container.trunk import unpack_rows
from runtime.trunk import Trunk
from tests.containers import build_container, kimi_linear_config


@pytest.mark.parametrize(("bits", "fmt"), [(4, TrunkFormat.Q4G), (8, TrunkFormat.Q8G), (32, TrunkFormat.F32)])
def test_a_matrix_is_what_the_file_says(tmp_path: Path, bits: int, fmt: TrunkFormat) -> None:
    folder = build_container(tmp_path, kimi_linear_config(num_hidden_layers=2), trunk_bits=bits)
    name = "model.layers.0.mlp.down_proj.weight"
    with ContainerReader.open(folder) as reader:
        matrix = Trunk(reader).matrix(name)
        assert (matrix.rows, matrix.cols, matrix.fmt) == (256, 512, fmt)
        dense = unpack_rows(*reader.read_trunk_rows(reader.entry(name), 0, 256), 512, fmt)
        unit = np.zeros(512, np.float32)
        unit[301] = 1
        np.testing.assert_array_equal(matrix.matvec(unit), dense[:, 301])
        np.testing.assert_array_equal(Trunk(reader).array(name), dense)


def test_an_embedding_row_costs_one_row_of_reading(kimi_linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ContainerReader.open(kimi_linear) as reader:
        name = "model.embed_tokens.weight"
        rows = Trunk(reader).array(name)
        embedding = Trunk(reader).embedding(name)
        read_bytes = []
        read = reader.read_trunk_range
        monkeypatch.setattr(
            reader, "read_trunk_range", lambda entry, start, n: read_bytes.append(n) or read(entry, start, n)
        )
        for index in (0, 17, 639):
            np.testing.assert_array_equal(embedding.row(index), rows[index])
        assert sum(read_bytes) == 3 * (256 + 2 * 2)  # 8-bit values and one f16 scale per group
