"""What README says of Kimi K3 against the arithmetic behind `plan`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from container.layout import TrunkFormat
from runtime.memory.plan import plan_memory
from runtime.options import RunOptions
from tests.runtime.test_memory import GIB, k3_manifest, real_k3

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def numbers(row: str) -> list[float]:
    """The numbers in the second cell of the row of README that begins so."""
    (cell,) = re.findall(rf"^\| {re.escape(row)}[^|]* \| ([^|]*) \|$", README, re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]


def test_k3_by_arithmetic() -> None:
    manifest, model = k3_manifest(TrunkFormat.Q8G), real_k3()
    plans = [
        plan_memory(manifest, model, RunOptions(context=context), n_threads=4) for context in (4096, 32_768, 1 << 20)
    ]
    assert numbers("trunk in memory") == [round(plans[0].trunk_bytes / GIB, 1)]
    assert numbers("everything, at") == pytest.approx([plan.floor_bytes / GIB for plan in plans], rel=0.01)
    top_k, n_layers, working_set = numbers("experts that one token asks for")
    assert top_k * n_layers == plans[0].experts_per_token
    assert working_set == round(plans[0].working_set_bytes / GIB, 1)
    speeds = [round(gb * 1e9 / plans[0].working_set_bytes, 2) for gb in (3, 7, 14)]
    assert numbers("tokens a second if a disk") == speeds
