"""The committed checkpoint: it is a K3 with all of its parts, it has been trained, and it is as small as promised."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from container.checkpoint import Checkpoint
from container.model import ModelConfig, canonical_config
from convert.arch import detect
from tests.checkpoints import k3_config, pack_mxfp4, tensor_table, unpack_mxfp4
from tests.trained.measuring import Measured, measure, tokenizer_of

HERE = Path(__file__).parent
FOLDER = HERE / "checkpoint"
HELD_OUT = HERE / "held_out.txt"
FIGURES = json.loads((HERE / "figures.json").read_bytes())
PREFIX = "language_model."
LARGEST_BYTES = 6_000_000
LARGEST_LOSS = 3.0  # nats per token; 6.9 is what knowing nothing costs


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with closing(Checkpoint.open(FOLDER)) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> ModelConfig:
    return ModelConfig.from_config(canonical_config(checkpoint.config))


@pytest.fixture(scope="module")
def measured() -> Measured:
    return measure(FOLDER, HELD_OUT.read_text(encoding="utf-8"))


def values(checkpoint: Checkpoint, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A bf16 or f32 tensor of the checkpoint, flat."""
    raw = np.asarray(checkpoint.read(PREFIX + name))
    if checkpoint.entry(PREFIX + name).dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float32)


def test_it_has_every_part_of_k3(model: ModelConfig) -> None:
    assert model.n_layers >= 6
    assert sorted(set(range(model.n_layers)) - model.kda.layers) == [3, 5]  # every fourth, and the last
    assert (model.kda.full_rank_gate, model.kda.gate_lower_bound, model.kda.conv_kernel) == (True, -5.0, 4)
    assert model.mla.output_gate
    assert model.mla.q_lora_rank is not None
    assert model.attn_res_block_size == 2
    assert model.hidden_act == "situ"
    assert (model.situ_beta, model.situ_linear_beta) == (4.0, 25.0)
    moe = model.moe
    assert moe.first_dense == 1
    assert moe.n_experts >= 16
    assert moe.top_k >= 2
    assert moe.n_shared_experts >= 1
    assert moe.renormalize
    assert moe.latent_norm
    assert moe.latent_size is not None
    assert moe.latent_size < model.hidden_size
    for rows, cols in model.expert_shapes.values():
        assert rows % 64 == 0
        assert cols % 32 == 0


def test_its_parts_have_been_trained(checkpoint: Checkpoint, model: ModelConfig) -> None:
    for layer in range(model.n_layers):
        at = f"model.layers.{layer}."
        assert values(checkpoint, at + "mlp_res_proj.weight").any()
        if layer:  # with the first layer there is nothing to mix yet
            assert values(checkpoint, at + "self_attention_res_proj.weight").any()
        if model.is_kda(layer):
            a_log = values(checkpoint, at + "self_attn.A_log")
            assert len(a_log) == 128
            assert a_log[: model.kda.n_heads].all()
            assert not a_log[model.kda.n_heads :].any()
        if model.is_moe(layer):
            assert np.ptp(values(checkpoint, at + "block_sparse_moe.gate.e_score_correction_bias")) > 0.01
            assert np.ptp(values(checkpoint, at + "block_sparse_moe.routed_expert_norm.weight")) > 0.01


def test_names_shapes_and_dtypes_are_the_release_s(checkpoint: Checkpoint) -> None:
    """By the tests' own table of the release, which knows no K3 without a vision tower."""
    table = tensor_table(checkpoint.config | {"vision_config": k3_config()["vision_config"]})
    expected = {spec.name: (spec.shape, spec.dtype) for spec in table if spec.name.startswith(PREFIX)}
    entries = {name: checkpoint.entry(name) for name in checkpoint.weight_map}
    assert {name: (tuple(entry.shape), entry.dtype) for name, entry in entries.items()} == expected


def test_its_files_are_the_release_s(checkpoint: Checkpoint) -> None:
    shards = {f"model-{number:05d}-of-000007.safetensors" for number in range(1, 8)}
    sides = {"config.json", "generation_config.json", "model.safetensors.index.json", "tiktoken.model"}
    assert {path.name for path in FOLDER.iterdir()} == shards | sides | {"tokenizer_config.json"}
    assert set(checkpoint.weight_map.values()) == shards
    generation = json.loads((FOLDER / "generation_config.json").read_bytes())
    assert tokenizer_of(FOLDER).decode([generation["eos_token_id"]]) == "<|end_of_msg|>"
    assert generation["eos_token_id"] == checkpoint.config["eos_token_id"]


def test_it_is_small() -> None:
    n_bytes = sum(path.stat().st_size for path in [*FOLDER.iterdir(), HELD_OUT])
    assert n_bytes <= LARGEST_BYTES


def test_most_of_its_trunk_is_large_enough_for_four_bits(checkpoint: Checkpoint) -> None:
    """A container keeps smaller matrices in f32, and with them nothing could be seen of 4 bits."""
    sizes = {
        tensor.name: math.prod(tensor.shape)
        for tensor in detect(checkpoint.config).trunk
        if "embed_tokens" not in tensor.name and "lm_head" not in tensor.name
    }
    large = sum(size for name, size in sizes.items() if size >= 65_536)
    assert large > 0.6 * sum(sizes.values())


def test_its_experts_are_mxfp4(checkpoint: Checkpoint) -> None:
    packed_names = [name for name in checkpoint.weight_map if name.endswith("_packed")]
    assert len(packed_names) == 3 * 5 * 36
    magnitudes = set()
    for name in packed_names:
        rows, half_cols = checkpoint.entry(name).shape
        packed = np.asarray(checkpoint.read(name)).reshape(rows, half_cols)
        scale = np.asarray(checkpoint.read(f"{name.removesuffix('_packed')}_scale")).reshape(rows, half_cols // 16)
        again = pack_mxfp4(unpack_mxfp4(packed, scale))
        np.testing.assert_array_equal(again[0], packed)
        np.testing.assert_array_equal(again[1], scale)
        magnitudes |= set(np.unique(packed & 7).tolist())
    assert magnitudes == set(range(8))


def test_it_predicts_text_it_has_not_seen(measured: Measured) -> None:
    assert measured.loss < LARGEST_LOSS
    assert measured.loss == pytest.approx(FIGURES["held_out_loss"]["checkpoint"], abs=0.01)


def test_every_expert_is_used(measured: Measured, model: ModelConfig) -> None:
    assert sorted(measured.expert_counts) == list(model.moe_layers)
    for counts in measured.expert_counts.values():
        assert sum(counts) == measured.n_tokens * model.moe.top_k
        assert min(counts) > 0
        assert max(counts) < 5 * sum(counts) / len(counts)  # no expert does it all


def test_its_tokenizer_returns_every_text(checkpoint: Checkpoint) -> None:
    tokenizer = tokenizer_of(FOLDER)
    text = HELD_OUT.read_text(encoding="utf-8") + "naïve 中文 🙂\n\n\t<|end_of_msg|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < 960  # no special token comes out of text
    assert checkpoint.config["text_config"]["vocab_size"] == 1024
