from __future__ import annotations

import copy
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import ConfigError
from container.model import MAX_LAYERS, ModelConfig, canonical_config
from tests import strategies
from tests.checkpoints import k3_config, kimi_linear_config

K3 = canonical_config(k3_config())
LINEAR = canonical_config(kimi_linear_config())


def test_k3_is_unwrapped():
    release = k3_config()
    text = release.pop("text_config")
    assert K3["_outer"] == release
    assert {key: K3[key] for key in text} == text


def test_the_release_is_not_changed():
    release = k3_config()
    kept = copy.deepcopy(release)
    canonical_config(release)["_outer"] = None
    assert release == kept


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("n_routed_experts", "num_experts"),
        ("num_local_experts", "num_experts"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
    ],
)
def test_moe_keys_get_one_spelling(spelling, canonical):
    assert canonical_config({spelling: 7})[canonical] == 7
    assert canonical_config({spelling: 7, canonical: 8})[canonical] == 8


@pytest.mark.parametrize(
    ("release", "present"),
    [
        ({}, False), ({"moe_renormalize": True}, True), ({"moe_renormalize": False}, False),
        ({"norm_topk_prob": True}, True), ({"norm_topk_prob": False}, False),
        ({"moe_renormalize": False, "norm_topk_prob": True}, False),
    ],
)  # fmt: skip
def test_renormalise_is_present_only_when_true(release, present):
    """Readers test for the key's presence, so `false` must not stand there."""
    assert canonical_config(release).get("moe_renormalize") is (True if present else None)


def test_other_flags_are_present_only_when_true():
    """Readers test for these keys' presence too."""
    false = {
        "mla_use_output_gate": False,
        "latent_moe_use_norm": None,
        "linear_attn_config": {"use_full_rank_gate": False},
    }
    assert canonical_config(false) == {"linear_attn_config": {}}
    true = {
        "mla_use_output_gate": True,
        "latent_moe_use_norm": True,
        "linear_attn_config": {"use_full_rank_gate": True},
    }
    assert canonical_config(true) == true


def test_text_config_must_be_an_object():
    with pytest.raises(ConfigError, match="text_config"):
        canonical_config({"text_config": []})


def test_layers_and_shapes():
    model = ModelConfig.from_config(K3)
    assert [layer for layer in range(6) if not model.is_kda(layer)] == [3, 5]
    assert list(model.moe_layers) == [1, 2, 3, 4, 5]
    assert not model.is_moe(0)
    assert model.expert_shapes == {"gate": (96, 128), "up": (96, 128), "down": (128, 96)}
    assert ModelConfig.from_config(LINEAR).expert_shapes["gate"] == (96, 256)  # no latent: the hidden size


def test_both_shapes_differ_where_the_releases_do():
    k3, linear = ModelConfig.from_config(K3), ModelConfig.from_config(LINEAR)
    assert (k3.kda.full_rank_gate, k3.kda.gate_lower_bound) == (True, -5.0)
    assert (linear.kda.full_rank_gate, linear.kda.gate_lower_bound) == (False, None)
    assert (k3.mla.q_lora_rank, k3.mla.output_gate, k3.moe.latent_norm) == (96, True, True)
    assert (linear.mla.q_lora_rank, linear.mla.output_gate, linear.moe.latent_norm) == (None, False, False)
    assert (k3.attn_res_block_size, linear.attn_res_block_size) == (2, None)
    assert (k3.hidden_act, k3.situ_beta, k3.situ_linear_beta) == ("situ", 4.0, 25.0)


def changed(base: dict[str, Any], **values: Any) -> dict[str, Any]:
    config = copy.deepcopy(base)
    for key, value in values.items():
        holder = config["linear_attn_config"] if key in config["linear_attn_config"] else config
        holder[key] = value
    return config


NEEDED = [
    "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "hidden_act",
    "linear_attn_config", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "num_experts", "num_experts_per_token", "moe_intermediate_size", "mla_use_nope",
]  # fmt: skip


@pytest.mark.parametrize("key", NEEDED)
def test_missing_keys_are_named(key):
    config = copy.deepcopy(LINEAR)
    del config[key]
    with pytest.raises(ConfigError, match=f"`{key}`"):
        ModelConfig.from_config(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0), ("hidden_size", -8), ("hidden_size", True), ("hidden_size", 64.0), ("hidden_size", "64"),
        ("hidden_size", 10**30), ("num_hidden_layers", MAX_LAYERS + 1), ("num_hidden_layers", 10**12),
        ("num_experts", 65536), ("num_experts_per_token", 9), ("num_expert_group", 3), ("topk_group", 2),
        ("first_k_dense_replace", 7), ("rms_norm_eps", "small"), ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 10**400), ("routed_scaling_factor", True), ("activation_situ_beta", "4"),
        ("activation_situ_linear_beta", []), ("attn_res_block_size", "12"), ("attn_res_block_size", -1),
        ("gate_lower_bound", "low"), ("gate_lower_bound", 0), ("gate_lower_bound", 5.0), ("rms_norm_eps", 0),
        ("use_full_rank_gate", "no"), ("mla_use_output_gate", 1), ("latent_moe_use_norm", "x"),
        ("q_lora_rank", 0), ("routed_expert_hidden_size", "x"), ("linear_attn_config", []),
        ("kda_layers", [1, 2, 3, 5, 7]), ("kda_layers", [0, 1, 2, 4]), ("kda_layers", [True, 2, 3, 5]),
        ("kda_layers", None), ("kda_layers", [1, 2, 3]), ("kda_layers", [1, 2, 3, 4, 5]), ("kda_layers", ["1"]),
        ("full_attn_layers", 4), ("full_attn_layers", ["4", "6"]), ("full_attn_layers", [[4]]),
        ("full_attn_layers", [4, 4, 6]),
        ("mla_use_nope", False), ("hidden_act", "gelu"), ("moe_router_activation_func", "softmax"),
        ("tie_word_embeddings", True), ("moe_layer_freq", 2), ("num_nextn_predict_layers", 1), ("hidden_act", ["silu"]),
    ],
)  # fmt: skip
def test_bad_values_are_named(key, value):
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_config(changed(K3, **{key: value}))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert key in str(caught.value) or "num_experts" in str(caught.value) or "experts cannot form" in str(caught.value)


def test_fewer_experts_in_the_kept_groups_than_chosen_are_refused():
    with pytest.raises(ConfigError, match="`num_experts_per_token` 2 is above the 1 experts of the kept groups"):
        ModelConfig.from_config(changed(K3, num_experts=8, num_experts_per_token=2, num_expert_group=8))


@given(st.data(), st.sampled_from([K3, LINEAR]))
def test_hostile_values_are_refused_or_understood(data, base):
    """Any other exception than ConfigError fails, from a release's config as from a manifest's."""
    release = data.draw(strategies.with_hostile_value(base))
    try:
        model = ModelConfig.from_config(canonical_config(release))
    except ConfigError:
        return
    assert len(model.moe_layers) <= model.n_layers <= MAX_LAYERS
    json.dumps(model.expert_shapes)
