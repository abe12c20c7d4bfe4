"""NaN and infinity are refused by tensor name and row; nothing of the layer counts as finished."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from container.errors import WeightError
from tests.checkpoints import checkpoint_tensors
from tests.convert.small import EMBEDDING, EXPERT, convert_here, run_cli, small_k3, write_small

W2 = EXPERT.format(layer=2, expert=1, matrix="w2")
A_LOG = "language_model.model.layers.0.self_attn.A_log"
PATCH = "vision_tower.patch_embed.proj.weight"


def spoil(tensors, name, row, value):
    """One bad weight in a row of a plain tensor, or a NaN scale in an MXFP4 pair."""
    if name in tensors:
        flat = tensors[name].reshape(-1, tensors[name].shape[-1])
        flat[row, -1] = value
    else:
        tensors[f"{name}_scale"][row, -1] = value


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [
        (EMBEDDING, 639, np.nan),
        (EMBEDDING, 0, np.inf),
        (A_LOG, 0, -np.inf),
        (PATCH, 31 * 3 * 14 + 5, np.nan),
        (W2, 63, 255),  # E8M0's NaN
        (W2, 0, 255),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_the_tensor_is_named(tmp_path, name, row, value):
    tensors = checkpoint_tensors(small_k3())
    spoil(tensors, name, row, value)
    source = write_small(tmp_path / "checkpoint", tensors)
    with pytest.raises(WeightError) as refusal:
        convert_here(source, tmp_path / "out")
    stored_row = row // (3 * 14) if name == PATCH else row  # the kernel is stored as [out, in · kh · kw]
    assert f"{source}: tensor {name}: row {stored_row} holds NaN or infinity" in str(refusal.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.usefixtures("in_this_process")
def test_overflow_of_mxfp4_is_infinity(tmp_path):
    """Scale byte 254 is 2^127: fine under 1, beyond f32 under 6."""
    tensors = checkpoint_tensors(small_k3())
    tensors[f"{W2}_packed"][7, :16] = 0x77
    tensors[f"{W2}_scale"][7, 0] = 254
    source = write_small(tmp_path / "checkpoint", tensors)
    with pytest.raises(WeightError, match="row 7 holds NaN or infinity"):
        convert_here(source, tmp_path / "out")


@pytest.mark.usefixtures("in_this_process")
def test_bf16_experts_are_checked_too(tmp_path):
    config = small_k3(quantization_config=None)
    tensors = checkpoint_tensors(config)
    tensors[W2][5, 3] = ml_dtypes.bfloat16(np.inf)
    source = write_small(tmp_path / "checkpoint", tensors, quantization_config=None)
    with pytest.raises(WeightError, match="row 5 holds NaN or infinity"):
        convert_here(source, tmp_path / "out")


def test_the_command_says_it_in_one_line(tmp_path):
    """Through a real worker: exit 1, no traceback, nothing under the manifest's name, and the other layers stay."""
    tensors = checkpoint_tensors(small_k3())
    spoil(tensors, W2, 9, 255)
    source = write_small(tmp_path / "checkpoint", tensors)
    done = run_cli(source, tmp_path / "out", "--workers", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"error: {source}: tensor {W2}: row 9 holds NaN or infinity")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "out" / "experts-L2.bin").exists()
    assert (tmp_path / "out" / ".build" / "done-L1.json").exists()
