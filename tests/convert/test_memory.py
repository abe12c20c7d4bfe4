"""The memory estimate is an upper bound of what workers really take, and does not grow with the layers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from container.layout import VQ3R
from convert.arch import detect
from convert.memory import worker_memory
from convert.plan import plan_conversion
from tests.checkpoints import k3_config, kimi_linear_config, write_checkpoint
from tests.convert.small import REPOSITORY, convert_here

# A conversion from a parent process with much memory of its own, which its workers must not be charged with.
FAT_PARENT = """
import io, sys
from pathlib import Path
from convert.options import ConvertOptions
from convert.run import convert

if __name__ == "__main__":
    ballast = bytearray(b"x") * 800_000_000
    options = ConvertOptions(source=Path(sys.argv[1]), output=Path(sys.argv[2]), workers=1)
    print(convert(options, io.StringIO()).peak_worker_bytes)
"""


def estimate(config) -> int:
    return worker_memory(plan_conversion(detect(config), VQ3R, 4))


def test_the_estimate_is_above_the_measured_peak(family):
    assert 50 << 20 < family.summary.peak_worker_bytes < estimate(family.config)


def test_layers_do_not_count():
    assert estimate(k3_config()) == estimate(k3_config(num_hidden_layers=60))


def test_experts_do_not_count():
    assert estimate(kimi_linear_config()) == estimate(kimi_linear_config(num_experts=512))


def test_real_shapes_fit_into_2_gb():
    """K3's expert shapes; what a worker really takes there is measured by the slow test in test_real_shapes."""
    config = k3_config(moe_intermediate_size=3072, routed_expert_hidden_size=3584, num_experts=896, vocab_size=163840)
    assert estimate(config) < 2e9


def test_a_large_parent_is_not_charged_to_its_workers(tmp_path, k3):
    script = tmp_path / "fat.py"
    script.write_text(FAT_PARENT)
    done = subprocess.run(
        [sys.executable, script, k3.source, tmp_path / "out"],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert int(done.stdout) < 600_000_000


@pytest.mark.slow
def test_the_estimate_holds_for_the_builders_own_models(tmp_path):
    """The larger fixtures, whose training fills more of a sample."""
    for name, config in (("k3", k3_config()), ("kimi_linear", kimi_linear_config())):
        source = write_checkpoint(tmp_path / name, config)
        summary, _ = convert_here(source, tmp_path / f"{name} out", workers=1)
        assert summary.peak_worker_bytes < estimate(config)
