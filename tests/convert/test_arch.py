"""What the converter expects of a checkpoint, against the tests' own inventory of the releases, and hostile configs."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import MoedockError
from container.layout import VQ3R
from container.model import KINDS
from convert.arch import FAMILIES, detect
from convert.plan import plan_conversion
from convert.sidecars import plan_sidecars
from tests.checkpoints import k3_config, kimi_linear_config, tensor_table
from tests.convert.small import small_k3, small_kimi_linear
from tests.strategies import with_hostile_value

K3_DATA = Path(__file__).parents[2].parent / "shared" / "data" / "k3"
needs_k3_data = pytest.mark.skipif(not K3_DATA.is_dir(), reason="the released config and index are not here")

CONFIGS = {
    "k3": k3_config(),
    "kimi linear": kimi_linear_config(),
    "small k3": small_k3(),
    "small kimi linear": small_kimi_linear(),
    "k3 with bf16 experts": k3_config(quantization_config=None),
    "k3 with two dense layers": k3_config(first_k_dense_replace=2),
    "kimi linear with low-rank queries": kimi_linear_config(q_lora_rank=48),
    "kimi linear with 130 heads": kimi_linear_config(linear_attn_config={"num_heads": 130, "head_dim": 8}),
    "k3 with 130 heads": k3_config(linear_attn_config={"num_heads": 130, "head_dim": 8}),
}


def logical_table(config):
    """Name → shape of every logical tensor of the inventory; an MXFP4 pair counts as its matrix."""
    shapes = {}
    for name, shape, _ in tensor_table(config):
        if name.endswith(".weight_packed"):
            shapes[name.removesuffix("_packed")] = (shape[0], 2 * shape[1])
        elif not name.endswith(".weight_scale"):
            shapes[name] = shape
    return shapes


def described_table(config):
    """The same from the converter's description."""
    architecture = detect(config)
    shapes = {tensor.source: tensor.shape for tensor in architecture.trunk}
    model = architecture.model
    for layer in model.moe_layers:
        for expert in range(model.moe.n_experts):
            for kind in KINDS:
                shapes[architecture.experts.source(layer, expert, kind)] = model.expert_shapes[kind]
    return shapes


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes(name):
    assert described_table(CONFIGS[name]) == logical_table(CONFIGS[name])


@needs_k3_data
def test_the_released_index_holds_exactly_these_tensors():
    config = json.loads((K3_DATA / "config.json").read_text())
    with gzip.open(K3_DATA / "model.safetensors.index.json.gz") as file:
        weight_map = json.load(file)["weight_map"]
    names = set()
    for name in described_table(config):
        names |= {f"{name}_packed", f"{name}_scale"} if ".experts." in name else {name}
    assert names == set(weight_map)


def test_the_released_kimi_linear_has_its_number_of_weights():
    """Dimensions as published; 49,122,681,728 weights in 20,493 tensors (docs/MODELS.md 2.2)."""
    config = kimi_linear_config(
        vocab_size=163840, hidden_size=2304, intermediate_size=9216, num_hidden_layers=27, num_attention_heads=32,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=256,
        moe_intermediate_size=1024, num_shared_experts=1,
        linear_attn_config={"num_heads": 32, "head_dim": 128},
    )  # fmt: skip
    table = described_table(config)
    assert len(table) == 20_493
    assert sum(map(math.prod, table.values())) == 49_122_681_728


def test_manifest_facts():
    k3, linear = detect(k3_config()), detect(kimi_linear_config())
    assert (k3.arch, k3.tensor_prefix) == ("kimi-k3", "language_model.")
    assert (linear.arch, linear.tensor_prefix) == ("kimi-linear", "")
    assert k3.config["_outer"]["model_type"] == "kimi_k3"
    assert "text_config" not in k3.config


def test_gate_up_and_down_are_w1_w3_and_w2():
    names = detect(kimi_linear_config()).experts
    found = [names.source(3, 7, kind).rsplit(".", 2)[1] for kind in KINDS]
    assert found == ["w1", "w3", "w2"]
    assert names.source(3, 7, "gate") == "model.layers.3.block_sparse_moe.experts.7.w1.weight"


def test_stored_shape_of_the_patch_convolution():
    (tensor,) = (t for t in detect(k3_config()).trunk if t.name == "vision_tower.patch_embed.proj.weight")
    assert (tensor.shape, tensor.stored_shape) == ((128, 3, 14, 14), (128, 588))


@pytest.mark.parametrize("model_type", ["deepseek_v3", None, 3, ["kimi_linear"]])
def test_an_unknown_family_is_refused(model_type):
    config = kimi_linear_config() | {"model_type": model_type}
    with pytest.raises(MoedockError, match="is not supported; known are kimi_linear, kimi_k3"):
        detect(config)
    assert all(isinstance(name, str) for names in FAMILIES for name in names)


def changed(**vision):
    config = small_k3()
    config["vision_config"] = config["vision_config"] | vision
    return config


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (changed(vt_hidden_size="32"), "vision_config.vt_hidden_size"),
        (changed(vt_num_hidden_layers=10**12), "vision_config.vt_num_hidden_layers"),
        (changed(vt_num_hidden_layers=True), "vision_config.vt_num_hidden_layers"),
        (changed(patch_size=0), "vision_config.patch_size"),
        (changed(text_hidden_size=None), "vision_config.text_hidden_size"),
        (changed(merge_kernel_size=2), "vision_config.merge_kernel_size"),
        (changed(merge_kernel_size=[2]), "vision_config.merge_kernel_size"),
        (changed(merge_kernel_size=[2, "2"]), "vision_config.merge_kernel_size"),
        (small_k3() | {"vision_config": [1]}, "`vision_config` must be an object"),
        (small_kimi_linear() | {"_outer": 5}, "`_outer` must be an object"),
        (small_kimi_linear() | {"_outer": {"vision_config": "x"}}, "`vision_config` must be an object"),
        (small_k3() | {"text_config": 1}, "text_config"),
    ],
)
def test_hostile_configs(config, text):
    with pytest.raises(MoedockError, match=text):
        detect(config)


def test_a_config_too_deep_for_the_manifest_is_refused_at_once():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MoedockError, match="nested too deeply"):
        detect(small_kimi_linear() | {"extra": deep})


@given(data=st.data())
def test_any_config_is_planned_or_refused(data, tmp_path):
    """Whatever stands in config.json: a plan or an error of ours, and no hang."""
    config = data.draw(with_hostile_value(data.draw(st.sampled_from([small_k3(), small_kimi_linear()]))))
    try:
        architecture = detect(config)
        plan = plan_conversion(architecture, VQ3R, 4)
        plan_sidecars(tmp_path, architecture)
    except MoedockError:
        return
    assert plan.total_bytes > 0
