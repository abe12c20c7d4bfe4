"""Everything that stands against a conversion is found before the first byte is written, in one list."""

from __future__ import annotations

import json

import numpy as np
import pytest

import convert.preflight
from container.errors import MoedockError, PreflightError, UsageError
from convert.preflight import MAX_PROBLEMS
from tests.checkpoints import checkpoint_tensors, write_checkpoint
from tests.convert.small import (
    EMBEDDING,
    EXPERT,
    contents,
    convert_here,
    dry_run_here,
    edit_header,
    edit_json,
    shard_of,
    small_k3,
    small_kimi_linear,
    write_small,
)

W1 = EXPERT.format(layer=1, expert=3, matrix="w1")
NORM = "language_model.model.layers.2.input_layernorm.weight"
QUERY = "language_model.model.layers.0.self_attn.q_proj.weight"


def problems(source, output, **options) -> list[str]:
    """What a conversion is refused for; it must have written nothing, and a dry run must say the same."""
    before = contents(output.parent)
    with pytest.raises(PreflightError) as refusal:
        convert_here(source, output, **options)
    assert contents(output.parent) == before
    found = dry_run_here(source, output, **options)["problems"]
    assert sorted(found) == sorted(refusal.value.problems)
    for problem in refusal.value.problems[:40]:
        assert f"\n  - {problem}" in str(refusal.value)
    return refusal.value.problems


def expect(found: list[str], *texts: str) -> None:
    """Each text is in a line of its own, and there are no other lines."""
    assert len(found) == len(texts), found
    for text in texts:
        assert len([problem for problem in found if text in problem]) == 1, (text, found)


def wrong_tensor(tensors, what):
    """Spoil the small checkpoint's tensors; returns what the message must say."""
    if what == "missing":
        del tensors[NORM]
        return [f"tensor {NORM}: missing"]
    if what == "missing expert":
        del tensors[f"{W1}_packed"], tensors[f"{W1}_scale"]
        return [f"tensor {W1}: missing"]
    if what == "half a pair":
        del tensors[f"{W1}_scale"]
        return [f"tensor {W1}: incomplete, only {W1}_packed exists"]
    if what == "twice":
        tensors[W1] = np.zeros((32, 64), np.float32)
        return [f"tensor {W1}: stored more than once, as plain and as MXFP4"]
    if what == "shape":
        tensors[NORM] = tensors[NORM][:-1]
        return [f"tensor {NORM}: shape [127], expected [128]"]
    if what == "I64":
        tensors[NORM] = np.ones(128, np.int64)
        return [f"tensor {NORM}: dtype I64, expected one of BF16, F16, F32"]
    assert what == "unknown"
    tensors["language_model.model.layers.2.self_attn.rotary.inv_freq"] = np.zeros(3, np.float32)
    tensors[f"{W1}_zero_point"] = np.zeros(3, np.uint8)
    return ["tensors that are not part of kimi-k3 as this program knows it: 'language_model."]


@pytest.mark.parametrize("what", ["missing", "missing expert", "half a pair", "twice", "shape", "I64", "unknown"])
def test_tensors(tmp_path, what):
    tensors = checkpoint_tensors(small_k3())
    expected = wrong_tensor(tensors, what)
    source = write_small(tmp_path / "checkpoint", tensors)
    expect(problems(source, tmp_path / "out"), *expected)


def test_fp8_is_not_read_yet(tmp_path):
    source = write_small(tmp_path / "checkpoint")

    def change(header):
        header[QUERY] |= {"dtype": "F8_E4M3", "shape": [32, 256]}

    edit_header(shard_of(source, QUERY), change)
    expect(problems(source, tmp_path / "out"), f"{QUERY}: dtype F8_E4M3, expected one", f"{QUERY}: shape [32, 256]")


def test_a_truncated_shard(tmp_path):
    source = write_small(tmp_path / "checkpoint")
    shard = shard_of(source, NORM)
    shard.write_bytes(shard.read_bytes()[:-100])
    expect(problems(source, tmp_path / "out"), f"{shard}: ")


def test_trailing_bytes(tmp_path):
    source = write_small(tmp_path / "checkpoint")
    shard = shard_of(source, NORM)
    shard.write_bytes(shard.read_bytes() + b"x")
    expect(problems(source, tmp_path / "out"), f"{shard}: 1 bytes follow the last tensor")


def test_a_missing_shard(tmp_path):
    source = write_small(tmp_path / "checkpoint")
    shard = shard_of(source, NORM)
    shard.unlink()
    expect(problems(source, tmp_path / "out"), f"shard {shard}: missing; download it")


def test_a_shard_that_is_a_folder_or_a_dead_link(tmp_path):
    source = write_small(tmp_path / "checkpoint")
    first, second = shard_of(source, QUERY), shard_of(source, NORM)
    first.unlink()
    first.mkdir()
    second.unlink()
    second.symlink_to(tmp_path / "nowhere")
    expect(problems(source, tmp_path / "out"), f"{first}: is not a regular file", f"shard {second}: missing")


def test_an_index_that_promises_too_much(tmp_path):
    """NORM is in the index, but its shard holds it under another name."""
    source = write_small(tmp_path / "checkpoint")
    edit_header(shard_of(source, NORM), lambda header: header.update(other=header.pop(NORM)))
    expect(problems(source, tmp_path / "out"), f"tensor {NORM} is missing, though the index says it is here")


def test_an_index_without_a_tensor_of_the_shard(tmp_path):
    source = write_small(tmp_path / "checkpoint")
    edit_json(source / "model.safetensors.index.json", lambda index: index["weight_map"].pop(NORM))
    expect(problems(source, tmp_path / "out"), f"tensor {NORM}: missing")


def test_a_config_of_another_shape(tmp_path):
    source = write_small(tmp_path / "checkpoint")
    edit_json(source / "config.json", lambda config: config["text_config"].update(vocab_size=641))
    expect(
        problems(source, tmp_path / "out"),
        f"{EMBEDDING}: shape [640, 128], expected [641, 128]",
        "lm_head.weight: shape [640, 128], expected [641, 128]",
    )


def test_a_config_of_another_model_ends_the_search(tmp_path):
    """A line for each of millions of tensors would fill the memory."""
    source = write_small(tmp_path / "checkpoint")
    edit_json(source / "config.json", lambda config: config["text_config"].update(num_experts=2000))
    found = problems(source, tmp_path / "out")
    assert MAX_PROBLEMS < len(found) < 8 * MAX_PROBLEMS
    assert found[0] == "stopped looking after layer 1: is this config.json the one of these shards?"


def test_an_output_folder_that_is_not_empty(tmp_path):
    source = write_small(tmp_path / "checkpoint")
    (tmp_path / "out").mkdir()
    for name in ("b", "a", "d", "c"):
        (tmp_path / "out" / name).write_text("mine")
    expect(problems(source, tmp_path / "out"), "holds a, b, c and no unfinished build; choose an empty folder")


@pytest.mark.parametrize("inside", ["", "sub", "sub/sub"])
def test_an_output_that_is_or_lies_below_a_file(tmp_path, inside):
    source = write_small(tmp_path / "checkpoint")
    (tmp_path / "file").write_text("mine")
    expect(problems(source, tmp_path / "file" / inside), f"{tmp_path / 'file'} is not a folder")


def test_an_output_that_is_a_dead_link(tmp_path):
    source = write_small(tmp_path / "checkpoint")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    expect(problems(source, tmp_path / "link"), f"is a link to {tmp_path / 'nowhere'}, which does not exist")


def test_an_output_without_permission(tmp_path, monkeypatch):
    source = write_small(tmp_path / "checkpoint")
    monkeypatch.setattr("convert.build.os.access", lambda path, mode: path != tmp_path)
    expect(problems(source, tmp_path / "out"), f"{tmp_path} is not writable")


def test_disk_and_memory_too_small(tmp_path, monkeypatch):
    source = write_small(tmp_path / "checkpoint")
    monkeypatch.setattr(convert.preflight, "free_disk", lambda folder: 1 << 20)
    monkeypatch.setattr(convert.preflight, "available_memory", lambda: 1 << 20)
    expect(
        problems(source, tmp_path / "out", workers=2),
        f"needed at {tmp_path / 'out'}, 1.0 MiB free",
        "memory: 2 workers need ",
    )


@pytest.mark.usefixtures("in_this_process")
def test_bytes_already_there_need_no_room(tmp_path, monkeypatch):
    """A resumed run needs only what is not yet on the disk."""
    source = write_small(tmp_path / "checkpoint")
    convert_here(source, tmp_path / "out", layers=frozenset({0, 1}))
    present = (tmp_path / "out" / "experts-L1.bin").stat().st_size
    present += (tmp_path / "out" / ".build" / "trunk.bin").stat().st_size
    plan = dry_run_here(source, tmp_path / "out")
    needed = plan["total_bytes"] + convert.preflight.SMALL_FILES_BYTES - present
    assert plan["room_bytes"] == needed
    # what a killed worker left goes before anything is written
    (tmp_path / "out" / ".experts-L2.bin.0a1b2c3d.tmp").write_bytes(bytes(5000))
    (tmp_path / "out" / ".build" / ".done-L2.json.0a1b2c3d.tmp").write_bytes(bytes(50))
    needed -= 5050
    assert dry_run_here(source, tmp_path / "out")["room_bytes"] == needed
    monkeypatch.setattr(convert.preflight, "free_disk", lambda folder: needed - 1)
    expect(problems(source, tmp_path / "out"), "disk: ")
    monkeypatch.setattr(convert.preflight, "free_disk", lambda folder: needed)
    assert convert_here(source, tmp_path / "out")[0].complete


def test_all_at_once(tmp_path, monkeypatch):
    """One list: tensors, shards, folder, disk and memory."""
    tensors = checkpoint_tensors(small_k3())
    expected = [wrong_tensor(tensors, what) for what in ("half a pair", "shape", "unknown")]
    source = write_small(tmp_path / "checkpoint", tensors)
    vision = shard_of(source, "vision_tower.encoder.final_layernorm.weight")
    vision.write_bytes(vision.read_bytes()[:-1])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    monkeypatch.setattr(convert.preflight, "free_disk", lambda folder: 0)
    monkeypatch.setattr(convert.preflight, "available_memory", lambda: 0)
    texts = [text for each in expected for text in each]
    expect(problems(source, tmp_path / "out"), *texts, str(vision), "holds mine", "disk: ", "memory: ")


def test_a_long_list_is_cut_when_shown():
    text = str(PreflightError([f"problem {n}" for n in range(100)]))
    assert "100 problem(s) found" in text
    assert text.endswith("… and 60 more")


@pytest.mark.parametrize("layer", [3, 9999])
def test_a_layer_out_of_range(tmp_path, layer):
    source = write_small(tmp_path / "checkpoint")
    with pytest.raises(UsageError, match=f"the model has layers 0 to 2, not {layer}"):
        convert_here(source, tmp_path / "out", layers=frozenset({1, layer}))
    assert not (tmp_path / "out").exists()


def spoil_config(folder):
    (folder / "config.json").write_text("{")


def spoil_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')


def remove_weights(folder):
    (folder / "model.safetensors.index.json").unlink()


def other_family(folder):
    edit_json(folder / "config.json", lambda config: config["text_config"].update(model_type="llama"))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_config, r"config\.json: cannot be read as JSON"),
        (spoil_index, "must give a plain file name for tensor a"),
        (remove_weights, "no weights here"),
        (other_family, "'llama' is not supported; known are kimi_linear, kimi_k3"),
    ],
)
def test_a_folder_that_is_no_checkpoint(tmp_path, spoil, text):
    source = write_small(tmp_path / "checkpoint")
    spoil(source)
    with pytest.raises(MoedockError, match=text):
        convert_here(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_that_cannot_be_cut_into_vectors(tmp_path):
    config = small_kimi_linear(moe_intermediate_size=36)
    source = write_checkpoint(tmp_path / "checkpoint", config)
    with pytest.raises(MoedockError, match="128 × 36 cannot be cut into vectors of 8 weights"):
        convert_here(source, tmp_path / "out")


def test_names_alone_are_enough_to_plan(tmp_path, k3):
    source = write_small(tmp_path / "checkpoint")
    for shard in source.glob("*.safetensors"):
        shard.unlink()
    plan = dry_run_here(source, tmp_path / "out")
    assert (plan["names_only"], plan["problems"], plan["shards_absent"]) == (True, [], 3)
    assert plan["total_bytes"] == k3.summary.container_bytes
    assert json.loads(json.dumps(plan)) == plan
