"""The checkpoint builders against other people's readers of each format."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiktoken
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from safetensors.numpy import load_file

from container.model import ModelConfig, canonical_config
from tests.checkpoints import (
    checkpoint_tensors,
    k3_config,
    kimi_linear_config,
    logical_tensor,
    pack_mxfp4,
    real_shape_slice,
    tensor_table,
    unpack_mxfp4,
    write_checkpoint,
)
from tests.checkpoints.tokenizer import N_RANKS, N_TOKENS, TEXT, special_tokens

# the pre-tokeniser of the Kimi vocabulary
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PRE_TOKENISER = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def test_tensors_have_the_tables_names_shapes_and_dtypes() -> None:
    numpy_dtypes = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32), "U8": np.dtype(np.uint8)}
    for config in (k3_config(), kimi_linear_config(), k3_config(quantization_config=None)):
        tensors = checkpoint_tensors(config)
        assert [(name, array.shape, array.dtype) for name, array in tensors.items()] == [
            (name, shape, numpy_dtypes[dtype]) for name, shape, dtype in tensor_table(config)
        ]


def test_packed_pairs_stand_where_they_are_asked_for() -> None:
    experts = {"experts.0.w1", "experts.7.w3"}
    resident = {"shared_experts.gate_proj", "routed_expert_down_proj", "routed_expert_up_proj"}
    at = "language_model.model.layers.1.block_sparse_moe."

    def packed(config: dict[str, Any], **options: bool) -> set[str]:
        names = {spec.name for spec in tensor_table(config, **options)}
        return {name for name in experts | resident if f"{at}{name}.weight_packed" in names}

    assert packed(k3_config()) == experts
    assert packed(k3_config(), resident_mxfp4=True) == experts | resident
    assert packed(k3_config(quantization_config=None), resident_mxfp4=True) == set()


def test_values_depend_on_the_seed_and_the_name_only() -> None:
    small, longer = k3_config(num_hidden_layers=2), k3_config(num_hidden_layers=3)
    first, again, other = (checkpoint_tensors(small, seed=seed) for seed in (1, 1, 2))
    beside = checkpoint_tensors(longer, seed=1)
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert np.array_equal(first[name], beside[name])
    assert not np.array_equal(first[name], other[name])
    assert not np.array_equal(first[name], first[name.replace("q_proj", "k_proj")])


def test_a_log_is_padded_with_zeros_and_router_biases_differ() -> None:
    tensors = checkpoint_tensors(k3_config(num_hidden_layers=2))
    a_log = tensors["language_model.model.layers.0.self_attn.A_log"]
    assert a_log.shape == (128,)
    assert a_log[:4].all()
    assert not a_log[4:].any()
    bias = tensors["language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias"]
    assert len(set(bias.tolist())) == 8


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.sampled_from([32, 96])),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    )
)
def test_mxfp4_packs_to_the_nearest_code(weights: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    packed, scales = pack_mxfp4(weights)
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(weights.shape)
    steps = np.repeat(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    clipped = np.clip(weights / steps, -6, 6)
    assert np.array_equal(values, clipped.astype(ml_dtypes.float4_e2m1fn).astype(np.float64))
    largest = np.abs(weights / steps).reshape(len(weights), -1, 32).max(axis=-1)
    assert ((largest < 8) & ((largest >= 4) | (scales == 1) | (largest == 0))).all()
    assert np.array_equal(unpack_mxfp4(packed, scales), (values * steps).astype(np.float32))


def test_mxfp4_reads_as_compressed_tensors_reads_it() -> None:
    rng = np.random.default_rng(3)
    packed = rng.integers(0, 256, (5, 48), dtype=np.uint8)
    scales = rng.integers(1, 254, (5, 3), dtype=np.uint8)
    values = unpack_fp4_from_uint8(torch.from_numpy(packed), 5, 96, dtype=torch.float32)
    steps = torch.from_numpy(2.0 ** (scales.astype(np.float32) - 127)).repeat_interleave(32, dim=1)
    assert np.array_equal(unpack_mxfp4(packed, scales), (values * steps).numpy())


def test_mxfp4_golden_bytes() -> None:
    weights = np.zeros((1, 32), dtype=np.float32)
    weights[0, :8] = [0.5, -1, 1.5, -2, 3, 4, -6, 0]
    packed, scales = pack_mxfp4(weights)
    assert packed.tobytes() == bytes([0xA1, 0xC3, 0x65, 0x0F]) + bytes(12)
    assert scales.tobytes() == bytes([127])
    with pytest.raises(ValueError, match="multiple of 32"):
        pack_mxfp4(np.zeros((1, 48), dtype=np.float32))


def test_logical_tensor_decodes_plain_and_packed() -> None:
    weights = np.array([[0.5, -6.0] * 16], dtype=np.float32)
    packed, scale = pack_mxfp4(weights)
    tensors = {
        "bf16.weight": weights.astype(ml_dtypes.bfloat16),
        "f16.weight": weights.astype(np.float16),
        "mx.weight_packed": packed,
        "mx.weight_scale": scale,
    }
    for name in ("bf16.weight", "f16.weight", "mx.weight"):
        assert logical_tensor(tensors, name).dtype == np.float32
        assert np.array_equal(logical_tensor(tensors, name), weights)
    with pytest.raises(KeyError):
        logical_tensor(tensors, "other.weight")


@pytest.mark.parametrize("config", [k3_config(), kimi_linear_config()], ids=["k3", "kimi-linear"])
def test_folder_holds_every_tensor_in_shards_by_layer(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = checkpoint_tensors(config, seed=5)
    folder = write_checkpoint(tmp_path / "ckpt", config, seed=5)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    read: dict[str, Any] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        held = load_file(shard)
        assert {index["weight_map"][name] for name in held} == {shard.name}
        read |= held
    assert len(set(index["weight_map"].values())) == 3
    assert read.keys() == tensors.keys() == index["weight_map"].keys()
    assert all(np.array_equal(read[name], tensors[name]) for name in tensors)
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in tensors.values())}
    assert list(index["weight_map"]) != sorted(index["weight_map"])
    layers = {
        (name.split(".layers.")[1].split(".")[0], shard)
        for name, shard in index["weight_map"].items()
        if ".layers." in name
    }
    assert len(layers) == canonical_config(config)["num_hidden_layers"]
    assert json.loads((folder / "config.json").read_text()) == config


def test_folder_file_names(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 2}
    k3 = write_checkpoint(tmp_path / "k3", k3_config(**small), n_shards=2)
    linear = write_checkpoint(tmp_path / "linear", kimi_linear_config(**small), n_shards=2)
    single = write_checkpoint(tmp_path / "single", kimi_linear_config(**small), single_file=True, tokenizer=False)
    configuration = {"config.json", "generation_config.json"}
    tokenizer = {"tiktoken.model", "tokenizer_config.json"}
    index = "model.safetensors.index.json"
    assert {path.name for path in k3.iterdir()} == configuration | tokenizer | {
        index,
        "preprocessor_config.json",
        "model-00001-of-000002.safetensors",
        "model-00002-of-000002.safetensors",
    }
    assert {path.name for path in linear.iterdir()} == configuration | tokenizer | {
        index,
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert {path.name for path in single.iterdir()} == configuration | {"model.safetensors"}
    with pytest.raises(ValueError, match="cannot fill 9 shards"):
        write_checkpoint(tmp_path / "many", kimi_linear_config(**small), n_shards=9)


@pytest.mark.parametrize("config", [k3_config(), kimi_linear_config()], ids=["k3", "kimi-linear"])
def test_tokenizer_works_with_tiktoken(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_checkpoint(
        tmp_path, config, tensors={"lm_head.weight": np.zeros((1, 1), np.float32)}, single_file=True
    )
    lines = (folder / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    assert sorted(ranks.values()) == list(range(N_RANKS))
    assert {bytes([value]) for value in range(256)} <= ranks.keys()
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    specials = {entry["content"]: int(token_id) for token_id, entry in added.items()}
    encoding = tiktoken.Encoding("small", pat_str=PRE_TOKENISER, mergeable_ranks=ranks, special_tokens=specials)
    for text in (TEXT, "It's 12345 tokens,\n\n  naïve — 中文 mixed\tIN.", ""):
        ids = encoding.encode(text)
        assert encoding.decode(ids) == text
        assert max(ids, default=0) < N_RANKS
    assert len(encoding.encode(TEXT)) < len(TEXT) / 2  # the merges are really used
    assert N_RANKS <= min(specials.values()) <= max(specials.values()) < N_TOKENS <= 640
    text_config = config.get("text_config", config)
    end = "<|end_of_msg|>" if "text_config" in config else "<|im_end|>"
    assert encoding.encode(end, allowed_special="all") == [text_config["eos_token_id"]]
    assert specials["[BOS]"] == text_config["bos_token_id"]
    assert specials["[PAD]"] == text_config["pad_token_id"]
    assert added[str(specials["[BOS]"])]["special"]


def test_the_same_id_means_different_strings_in_the_two_families() -> None:
    k3, linear = special_tokens("kimi_k3"), special_tokens("kimi_linear")
    assert (k3[N_RANKS + 3], linear[N_RANKS + 3]) == ("<|open|>", "<|im_user|>")
    assert k3[k3_config()["media_placeholder_token_id"]] == "<|media_pad|>"


def test_slice_equals_the_same_checkpoint_made_in_memory(tmp_path: Path) -> None:
    folder = real_shape_slice(tmp_path / "slice", n_experts=3, rows=96, cols=160, layers=2, seed=4)
    config = json.loads((folder / "config.json").read_text())
    expected = checkpoint_tensors(config, seed=4)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    for name, file_name in index["weight_map"].items():
        with safe_open(folder / file_name, framework="numpy") as shard:
            assert np.array_equal(shard.get_tensor(name), expected[name])
    model = ModelConfig.from_config(canonical_config(config))
    assert list(model.moe_layers) == [1, 2]
    assert model.expert_shapes == {"gate": (96, 160), "up": (96, 160), "down": (160, 96)}
