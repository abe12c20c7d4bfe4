"""Single damaged bytes anywhere in experts, trunk and codebooks: found where looked for, and never a crash.

Checksums do not cover a record's header and padding, and what lies between trunk tensors. A header contradicts itself
when damaged; what is left, no computation reads: the logits stay the same bits, and `validate` finds it all the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.containers import build_container, k3_config
from tests.runtime.flips import CHECKSUM, HEADER, UNREAD

ROOT = Path(__file__).parents[2]
# every token reads every expert; the vision tower is a part of the trunk that text does not use
CONFIG = k3_config(num_hidden_layers=2, num_experts=2, num_experts_per_token=2)


def flipped(folder: Path, seed: int, n_places: int, seconds: float) -> list[dict[str, Any]]:
    """Outcomes of a process of its own, in which a warning is an error."""
    build_container(folder, CONFIG)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.runtime.flips", str(folder), str(seed), str(n_places)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr)
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 3 * n_places
    return found


def assert_found(outcomes: list[dict[str, Any]]) -> None:
    for one in outcomes:
        ran = {name: one[name] in ("same logits", "other logits") for name in ("plain", "verified")}
        assert one["n_problems"] > 0, one
        if one["guard"] == UNREAD:
            assert one["plain"] == one["verified"] == "same logits", one
        else:
            assert not ran["verified"], one
        if one["guard"] == HEADER:
            assert one["plain"].startswith("FormatError: "), one
        for name, text in ((name, one[name]) for name in ran if not ran[name]):
            assert one["file"] in text, (name, one)
    assert {one["guard"] for one in outcomes} == {HEADER, CHECKSUM, UNREAD}
    assert any(one["plain"] == "other logits" for one in outcomes)


def test_flipped_bytes(tmp_path: Path) -> None:
    assert_found(flipped(tmp_path / "container", seed=0, n_places=16, seconds=250))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_flipped_bytes(tmp_path: Path) -> None:
    assert_found(flipped(tmp_path / "container", seed=1, n_places=200, seconds=850))
