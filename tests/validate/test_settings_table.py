"""The table of settings: rounding by hand, the joined models, and one whole table on containers that exist."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from container.checkpoint import Checkpoint
from container.reader import ContainerReader
from tests.benchmarks.settings_table import (
    AS_SOURCE,
    BALANCED,
    HEADINGS,
    ROUNDED,
    SETTINGS,
    Bench,
    JoinedTensors,
    line,
    rounded_to_nearest,
    rows,
)
from tests.validate.small_models import small_model
from validate.reference.tensors import MappingTensors

EXPERT = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
EIGHT_BITS = SETTINGS[-1]


def test_rounding_by_hand():
    matrix = torch.tensor([[7.0, -3.4, 0.6, -7.0], [0.0, 0.0, 0.0, 0.0], [-0.14, 0.05, 0.011, -0.009]])
    expected = torch.tensor([[7.0, -3, 1, -7], [0, 0, 0, 0], [-0.14, 0.04, 0.02, 0]])
    assert torch.allclose(rounded_to_nearest(matrix), expected, atol=1e-6)


def test_rounding_is_the_nearest_of_fifteen_values():
    matrix = torch.from_numpy(np.random.default_rng(1).standard_normal((5, 40)).astype(np.float32))
    for row, found in zip(matrix.tolist(), rounded_to_nearest(matrix).tolist(), strict=True):
        step = max(map(abs, row)) / 7
        for value, rounded in zip(row, found, strict=True):
            assert rounded == pytest.approx(min((n * step for n in range(-7, 8)), key=lambda v: abs(v - value)))


def test_experts_and_trunk_come_from_their_own_side():
    ours, theirs = torch.zeros(3, 2), torch.ones(3, 2)
    both = [MappingTensors({EXPERT: side, "lm_head.weight": side}) for side in (ours, theirs)]
    joined = JoinedTensors(experts=both[0], trunk=both[1])
    assert (joined[EXPERT] == 0).all()
    assert (joined.rows(EXPERT, 0, 2) == 0).all()
    assert (joined["lm_head.weight"] == 1).all()
    assert (joined.rows("lm_head.weight", 1, 2) == 1).all()


def test_every_setting_is_converted_once():
    assert len({setting.arguments for setting in SETTINGS}) == len(SETTINGS) == 6
    assert BALANCED in SETTINGS
    assert EIGHT_BITS.arguments == (*BALANCED.arguments[:-1], "8")


def test_a_whole_table(kimi_linear, tmp_path, capsys):
    text: Path = tmp_path / "text"
    text.write_text("The library may be larger than the house.", encoding="utf-8")
    checkpoint = Checkpoint.open(kimi_linear.checkpoint)
    with ContainerReader.open(kimi_linear.container) as reader:
        bench = Bench(checkpoint, reader, text, 8, 20)
        found = list(rows(bench, {BALANCED: reader, EIGHT_BITS: reader}))
    checkpoint.close()
    assert [(row.experts, row.trunk, row.bits) for row in found] == [
        (AS_SOURCE, AS_SOURCE, None),
        ("balanced vq3r", "4 bits", 3),
        ("balanced vq3r", "8 bits", 3),
        ("balanced vq3r", AS_SOURCE, 3),
        (AS_SOURCE, "4 bits", None),
        (AS_SOURCE, "8 bits", None),
        (ROUNDED, "4 bits", 4),
        (ROUNDED, AS_SOURCE, 4),
    ]
    source, whole, _, experts, trunk, _, both, rounded = found
    assert (source.error, source.figures.kl.value, source.figures.top1_agreement.value) == (0, 0, 1)
    assert whole.error == experts.error
    assert 0.1 < experts.error < 0.25
    assert trunk.error == 0
    assert all(row.figures.kl.value > 1e-3 for row in found[1:])
    _, tensors = small_model(kimi_linear.config)
    matrices = [tensor.double() for name, tensor in tensors.items() if ".experts." in name]
    squares = [(rounded_to_nearest(each.float()).double() - each).square().sum() for each in matrices]
    expected = (sum(squares) / sum(each.square().sum() for each in matrices)) ** 0.5
    assert rounded.error == both.error == pytest.approx(float(expected), rel=1e-6)
    assert "choices of an expert change" in capsys.readouterr().out
    for row in found:
        assert line(row).count("|") == len(HEADINGS) + 1
    assert line(source).startswith("| as the source | as the source |  | 0.00% | ")
    assert line(source).endswith(" | 0.0000 [0.0000, 0.0000] | 100.0% [100.0%, 100.0%] |")
