"""Damaged and contradictory containers: one clear error, never a traceback, never silent garbage under --verify."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import FormatError, IntegrityError
from container.layout import EXPERT_HEADER
from container.reader import ContainerReader
from runtime.__main__ import main
from runtime.engine import Engine
from runtime.options import RunOptions
from tests.containers import build_container, k3_config, kimi_linear_config

EVERY_EXPERT = {"num_hidden_layers": 2, "num_experts": 2, "num_experts_per_token": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small container in which every token reads every expert."""
    return build_container(tmp_path / "container", kimi_linear_config(**EVERY_EXPERT))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, for tests that undo their damage."""
    return build_container(tmp_path_factory.mktemp("pristine"), kimi_linear_config(**EVERY_EXPERT))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def evaluate(folder: Path, *, verify: bool = False) -> None:
    with Engine.open(folder, RunOptions(verify=verify)) as engine:
        engine.evaluate([1, 2])


def test_all_missing_and_misshapen_tensors_are_named_in_one_message(tmp_path: Path) -> None:
    missing = ("model.norm.weight", "model.layers.1.block_sparse_moe.gate.weight")
    folder = build_container(tmp_path, k3_config(num_hidden_layers=2), drop=missing)

    def reshape(manifest: dict[str, Any]) -> None:
        entry = next(each for each in manifest["trunk"] if each["name"].endswith("0.self_attn.b_proj.weight"))
        assert entry["shape"] == [4, 256]
        entry["shape"] = [256, 4]

    edit_manifest(folder, reshape)
    with pytest.raises(FormatError) as caught:
        Engine.open(folder)
    message = str(caught.value)
    assert "3 tensor(s)" in message
    assert "language_model.model.norm.weight is missing (expected [256])" in message
    assert "block_sparse_moe.gate.weight is missing (expected [8, 256])" in message
    assert "language_model.model.layers.0.self_attn.b_proj.weight has shape [256, 4], expected [4, 256]" in message
    assert "trunk.bin" in message


def test_numbers_behind_the_heads_of_a_padded_a_log_are_refused(tmp_path: Path) -> None:
    folder = build_container(tmp_path, k3_config(num_hidden_layers=2))
    with ContainerReader.open(folder) as reader:
        entry = reader.entry("model.layers.0.self_attn.A_log")
        assert entry.shape == (128,)
    flip(folder / "trunk.bin", entry.offset + 4 * 127 + 3)
    with pytest.raises(FormatError, match=r"A_log: the model has 4 heads, but the 128 stored numbers are not zero"):
        Engine.open(folder)


def test_a_missing_bank_and_a_truncated_one(folder: Path) -> None:
    bank = folder / "experts-L1.bin"
    content = bank.read_bytes()
    bank.write_bytes(content[:-1])
    with pytest.raises(FormatError, match=rf"experts-L1\.bin: {len(content)} bytes expected"):
        evaluate(folder)
    bank.unlink()
    with pytest.raises(FormatError, match=r"experts-L1\.bin: cannot be opened"):
        evaluate(folder)


def test_a_bank_that_shrinks_while_open(folder: Path) -> None:
    with Engine.open(folder) as engine:
        bank = folder / "experts-L1.bin"
        with bank.open("r+b") as file:
            file.truncate(engine.reader.layout.stride_bytes)
        with pytest.raises(FormatError, match=r"layer 1 expert 1: .*experts-L1\.bin: .*the file ends"):
            engine.evaluate([1])


@pytest.mark.parametrize("offset", [0, 4, 6, 8, 10, 16, 20])
def test_a_flipped_byte_in_a_record_header_names_layer_and_expert(folder: Path, offset: int) -> None:
    with ContainerReader.open(folder) as reader:
        stride = reader.layout.stride_bytes
    flip(folder / "experts-L1.bin", stride + offset)
    with pytest.raises(FormatError, match=r"experts-L1\.bin: layer 1 expert 1"):
        evaluate(folder)


def test_a_flipped_payload_byte_is_found_when_verifying_and_harmless_when_not(folder: Path) -> None:
    with ContainerReader.open(folder) as reader:
        layout = reader.layout
    for offset in (EXPERT_HEADER.size, layout.scales_offset + layout.scales_bytes - 1):
        flip(folder / "experts-L1.bin", offset)
        evaluate(folder)
        with pytest.raises(IntegrityError, match=r"layer 1 expert 0: crc32"):
            evaluate(folder, verify=True)
        flip(folder / "experts-L1.bin", offset)
    evaluate(folder, verify=True)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",  # stays on disk
        "lm_head.weight",  # quantised
        "model.norm.weight",  # a vector
        "model.layers.1.block_sparse_moe.gate.weight",
    ],
)
def test_a_flipped_trunk_byte_is_found_by_name_when_verifying(folder: Path, name: str) -> None:
    with ContainerReader.open(folder) as reader:
        entry = reader.entry(name)
    for offset in (entry.offset, entry.offset + entry.n_bytes - 1):
        flip(folder / "trunk.bin", offset)
        evaluate(folder)
        with pytest.raises(IntegrityError, match=rf"trunk\.bin: {name}: crc32"):
            evaluate(folder, verify=True)
        flip(folder / "trunk.bin", offset)


def test_flipped_codebook_bytes(folder: Path) -> None:
    flip(folder / "codebooks.bin", 40)
    evaluate(folder)
    with pytest.raises(IntegrityError, match=r"codebooks\.bin: sha256"):
        evaluate(folder, verify=True)
    flip(folder / "codebooks.bin", 0)
    with pytest.raises(FormatError, match=r"codebooks\.bin: codebook 0: magic"):
        evaluate(folder)


def test_weights_that_are_no_numbers_give_an_error_not_a_result(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ContainerReader.open(folder) as reader:
        entry = reader.entry("model.layers.1.post_attention_layernorm.weight")
    content = bytearray((folder / "trunk.bin").read_bytes())
    content[entry.offset : entry.offset + 4] = np.float32(np.inf).tobytes()
    (folder / "trunk.bin").write_bytes(content)
    assert main(["eval", str(folder), "--ids", "1,2", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"error: {folder}: the logits are NaN or infinite, so weights are damaged; --verify says which\n"
    )


@given(
    st.sampled_from(["manifest.json", "trunk.bin", "experts-L1.bin", "codebooks.bin"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 7),
    st.booleans(),
)
def test_a_flipped_bit_anywhere_is_an_error_or_a_result(
    pristine: Path, name: str, place: float, bit: int, verify: bool
) -> None:
    path = pristine / name
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[int(place * len(content))] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        assert main(["eval", str(pristine), "--ids", "1,2", *(["--verify"] if verify else [])]) in (0, 1)
    finally:
        path.write_bytes(content)


def _remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _truncate_bank(folder: Path) -> None:
    (folder / "experts-L1.bin").write_bytes(b"")


def _flip_header(folder: Path) -> None:
    flip(folder / "experts-L1.bin", 0)


def _flip_payload(folder: Path) -> None:
    flip(folder / "experts-L1.bin", 60)


def _wrong_config(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest["config"].update(hidden_size=264))


def _truncate_trunk(folder: Path) -> None:
    (folder / "trunk.bin").write_bytes(b"\0" * 100)


@pytest.mark.parametrize(
    "damage",
    [_remove_manifest, _truncate_bank, _flip_header, _flip_payload, _wrong_config, _truncate_trunk, shutil.rmtree],
)
def test_the_command_line_reports_one_error_and_exits_1(
    folder: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    assert main(["eval", str(folder), "--ids", "1,2", "--verify"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert str(folder) in captured.err
    assert "Traceback" not in captured.err
