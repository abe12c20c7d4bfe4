"""Whole models against the dense float64 oracle, and the caches against themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from container.errors import MoedockError
from container.layout import EXPERT_QUANTS, VQ2R, VQ3R, ExpertFormat, ExpertQuant
from container.reader import ContainerReader
from runtime.engine import Engine
from runtime.models import StepTrace
from runtime.options import RunOptions
from tests.containers import build_container, k3_config, kimi_linear_config
from tests.runtime.oracle import Oracle, relative_error

# against f64, token by token and in one chunk
TOLERANCES = {1: 3e-6, 512: 6e-6}
TOKEN_BY_TOKEN = RunOptions(chunk=1)
IDS = [5, 600, 5, 17, 301, 0, 639, 42, 42, 8, 77]


def assert_like_the_oracle(folder: Path, ids: list[int]) -> None:
    oracle = Oracle(folder)
    logits, layers = oracle.logits(ids)
    for chunk, tolerance in TOLERANCES.items():
        with Engine.open(folder, RunOptions(verify=True, chunk=chunk)) as engine:
            evaluation = engine.evaluate(ids, trace=True)
        assert {layer: chosen.tolist() for layer, chosen in evaluation.routing.items()} == oracle.routing
        errors = [relative_error(found, expected) for found, expected in zip(evaluation.layers, layers, strict=True)]
        assert max(errors) <= tolerance, (chunk, errors)
        assert evaluation.logits.dtype == np.float32
        assert relative_error(evaluation.logits, logits) <= tolerance


@pytest.mark.parametrize("quant", EXPERT_QUANTS.values(), ids=lambda quant: quant.fmt.name)
@pytest.mark.parametrize("config", [k3_config(), kimi_linear_config()], ids=["k3", "kimi-linear"])
def test_expert_formats(tmp_path: Path, config: dict[str, Any], quant: ExpertQuant) -> None:
    assert_like_the_oracle(build_container(tmp_path, config, quant=quant), IDS)


@pytest.mark.parametrize("config", [k3_config(), kimi_linear_config()], ids=["k3", "kimi-linear"])
@pytest.mark.parametrize("trunk_bits", [4, 8, 32])
def test_trunk_formats_down_to_the_smallest_tensor(tmp_path: Path, config: dict[str, Any], trunk_bits: int) -> None:
    """Every tensor with two dimensions is quantised, rows that are no whole number of groups included."""
    assert_like_the_oracle(build_container(tmp_path, config, trunk_bits=trunk_bits, min_quantised_elements=1), IDS)


def test_a_prompt_longer_than_a_span_of_the_latent_cache(tmp_path: Path) -> None:
    ids = np.random.default_rng(3).integers(0, 640, 150).tolist()
    assert_like_the_oracle(build_container(tmp_path, k3_config(num_hidden_layers=4), quant=VQ2R), ids)


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_hidden_layers": 3, "attn_res_block_size": 12},  # one sum is put aside, the embedding
        {"num_hidden_layers": 3, "attn_res_block_size": 1},  # one in every layer
        {"num_hidden_layers": 2, "attn_res_block_size": None},
        {"num_hidden_layers": 2, "first_k_dense_replace": 0},
        {"num_hidden_layers": 2, "num_experts_per_token": 1},  # a single weight is not renormalised
        {"num_hidden_layers": 2, "num_experts_per_token": 8},
        {"num_hidden_layers": 2, "moe_renormalize": False, "routed_scaling_factor": 2.5},
        {"num_hidden_layers": 2, "activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.0},
        {"num_hidden_layers": 2, "hidden_act": "silu"},
        {"num_hidden_layers": 2, "linear_attn_config": {"gate_lower_bound": -1.25, "short_conv_kernel_size": 3}},
        {"num_hidden_layers": 2, "linear_attn_config": {"gate_lower_bound": None}},
        {"num_hidden_layers": 2, "mla_use_output_gate": False, "hidden_size": 200, "kv_lora_rank": 72},
    ],
    ids=str,
)
def test_settings_of_the_config(tmp_path: Path, overrides: dict[str, Any]) -> None:
    config = k3_config(**overrides)
    if overrides.get("mla_use_output_gate") is False:
        config["text_config"]["linear_attn_config"] |= {"kda_layers": [2], "full_attn_layers": [1]}
    assert_like_the_oracle(build_container(tmp_path, config), IDS[:6])


def test_small_queries_and_keys_are_shortened_as_the_norm_says(tmp_path: Path) -> None:
    """The tolerance stands under the root with the sum of squares: a key of size 1e-3 shrinks by the root of 2."""
    names = [f"model.layers.0.self_attn.{stream}_conv1d.weight" for stream in "qk"]
    change = {name: lambda taps: taps * np.float32(1e-3) for name in names}
    folder = build_container(tmp_path, k3_config(num_hidden_layers=2), change=change)
    assert_like_the_oracle(folder, IDS)


def test_groups_that_are_dropped_lose_to_any_score(tmp_path: Path) -> None:
    """A bias below the scores makes every choice negative; a dropped expert must not win with 0."""
    config = k3_config(num_hidden_layers=2, num_expert_group=4, topk_group=2)
    change = {"model.layers.1.block_sparse_moe.gate.e_score_correction_bias": lambda bias: bias - np.float32(3)}
    assert_like_the_oracle(build_container(tmp_path, config, change=change), IDS)


def test_expert_groups(tmp_path: Path) -> None:
    groups = {"num_expert_group": 4, "topk_group": 2, "num_experts": 16, "num_experts_per_token": 3}
    chosen = []
    for name, overrides in (("grouped", groups), ("plain", groups | {"topk_group": 4})):
        folder = build_container(tmp_path / name, k3_config(num_hidden_layers=2, **overrides))
        assert_like_the_oracle(folder, IDS)
        with Engine.open(folder) as engine:
            chosen.append(engine.evaluate(IDS, trace=True).routing[1].tolist())
    assert chosen[0] != chosen[1], "the groups must matter for this test to mean anything"


@pytest.mark.parametrize("name", ["k3", "kimi_linear"])
def test_one_call_two_calls_and_single_steps_agree_bit_for_bit(name: str, request: pytest.FixtureRequest) -> None:
    with Engine.open(request.getfixturevalue(name), TOKEN_BY_TOKEN) as engine:
        whole = engine.evaluate(IDS, trace=True)
        state = engine.new_state()
        parts = [engine.evaluate(part, state=state, trace=True) for part in (IDS[:4], IDS[4:])]
        assert state.position == len(IDS)
        np.testing.assert_array_equal(np.concatenate([part.logits for part in parts]), whole.logits)
        for layer in range(len(whole.layers)):
            np.testing.assert_array_equal(np.concatenate([part.layers[layer] for part in parts]), whole.layers[layer])
        # two sequences at a time, so that nothing may hide outside their states
        states = [engine.new_state(), engine.new_state()]
        for position, token_id in enumerate(IDS):
            trace = StepTrace()
            np.testing.assert_array_equal(engine.step(states[0], token_id, trace=trace), whole.logits[position])
            engine.step(states[1], 7)
            for layer, chosen in trace.routing.items():
                np.testing.assert_array_equal(chosen, whole.routing[layer][position : position + 1])


@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_only_the_last_logits_are_those_of_all(kimi_linear: Path, chunk: int) -> None:
    with Engine.open(kimi_linear, RunOptions(chunk=chunk)) as engine:
        whole, last = engine.evaluate(IDS), engine.evaluate(IDS, last_only=True)
        assert last.logits.shape == (1, engine.vocab_size)
        # one row is multiplied with the head's stored form, many with its rows unpacked
        assert relative_error(last.logits[0], whole.logits[-1]) <= 1e-6
        np.testing.assert_array_equal(engine.feed(engine.new_state(), IDS), last.logits[0])
        assert engine.evaluate([], last_only=True).logits.shape == (0, engine.vocab_size)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 639), min_size=2, max_size=12), st.data())
def test_logits_depend_on_earlier_tokens_alone(k3: Path, ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(ids) - 1))
    with Engine.open(k3, TOKEN_BY_TOKEN) as engine:
        whole = engine.evaluate(ids).logits
        np.testing.assert_array_equal(engine.evaluate(ids[:cut]).logits, whole[:cut])
        other = [*ids[:cut], (ids[cut] + 1) % 640]
        assert not np.array_equal(engine.evaluate(other).logits[cut], whole[cut])


def test_shapes_of_an_evaluation(k3: Path) -> None:
    with Engine.open(k3) as engine:
        evaluation = engine.evaluate([1, 2, 3], trace=True)
        assert evaluation.logits.shape == (3, 640)
        assert [layer.shape for layer in evaluation.layers] == [(3, 256)] * 6
        assert {layer: chosen.shape for layer, chosen in evaluation.routing.items()} == dict.fromkeys(
            range(1, 6), (3, 2)
        )
        plain = engine.evaluate([1, 2, 3])
        assert plain.layers == []
        assert plain.routing == {}
        np.testing.assert_array_equal(plain.logits, evaluation.logits)


def test_each_expert_is_one_read_of_one_record(k3: Path) -> None:
    with Engine.open(k3, TOKEN_BY_TOKEN) as engine:
        assert engine.store.statistics.n_reads == 0
        engine.evaluate([1, 2, 3])
        done = engine.store.statistics
        assert done.n_hits + done.n_misses == 3 * 5 * 2
        assert done.demand_reads + done.n_late == done.n_misses > 0
        assert done.read_bytes == done.n_reads * engine.reader.layout.stride_bytes


@pytest.mark.parametrize("bad", [-1, 640, 10**12])
def test_an_id_outside_the_vocabulary_is_named_before_anything_is_computed(k3: Path, bad: int) -> None:
    with Engine.open(k3) as engine:
        state = engine.new_state()
        with pytest.raises(MoedockError, match=rf"token id {bad} .* 0 to 639"):
            engine.evaluate([1, bad], state=state)
        with pytest.raises(MoedockError, match=f"token id {bad} "):
            engine.step(state, bad)
        assert state.position == 0


def test_a_state_of_another_model_is_refused(k3: Path, kimi_linear: Path) -> None:
    with Engine.open(k3) as engine, Engine.open(kimi_linear) as other:
        state = other.new_state()
        with pytest.raises(ValueError, match="layers"):
            engine.step(state, 1)


def test_the_state_grows_only_by_the_latent_cache(k3: Path) -> None:
    with Engine.open(k3) as engine:
        state = engine.new_state()
        empty = state.n_bytes
        engine.evaluate([1, 2, 3], state=state)
        model = engine.reader.model
        width = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
        assert state.n_bytes == empty + 2 * 3 * width * 4
        assert state.n_bytes == sum(array.nbytes for _, array in state.arrays())


def test_a_context_that_is_used_up_is_refused_before_anything_is_computed(k3: Path) -> None:
    with Engine.open(k3, RunOptions(context=4)) as engine:
        state = engine.new_state()
        with pytest.raises(MoedockError, match=r"context of 4 positions is used up.*--ctx 5"):
            engine.evaluate([1] * 5, state=state)
        engine.evaluate([1] * 4, state=state)
        with pytest.raises(MoedockError, match="--ctx 5"):
            engine.step(state, 1)
        assert state.position == 4


def test_a_state_filled_from_the_arrays_of_another_goes_on_bit_for_bit(k3: Path) -> None:
    with Engine.open(k3) as engine:
        state, restored = engine.new_state(), engine.new_state()
        engine.evaluate(IDS, state=state)
        engine.evaluate([3, 4], state=restored)  # what stood there before must not matter
        restored.resume_at(state.position)
        for (name, target), (other, source) in zip(restored.arrays(), state.arrays(), strict=True):
            assert name == other
            target[:] = source
        np.testing.assert_array_equal(engine.feed(restored, [7, 8]), engine.feed(state, [7, 8]))
        with pytest.raises(MoedockError, match="--ctx"):
            restored.resume_at(engine.context + 1)


def test_a_container_of_another_writer_has_no_checksums(tmp_path: Path) -> None:
    folder = build_container(tmp_path, kimi_linear_config(num_hidden_layers=2), checksums=False)
    with ContainerReader.open(folder) as reader:
        assert reader.manifest.expert_quant is VQ3R
        assert reader.manifest.expert_quant.fmt is ExpertFormat.VQ3R
    assert_like_the_oracle(folder, [1, 2, 3])
