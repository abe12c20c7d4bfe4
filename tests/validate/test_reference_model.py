"""The reference's way with its inputs: names, shapes, ids, rows, and what it keeps alive."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from container.errors import CheckError
from tests.checkpoints import k3_config, kimi_linear_config
from tests.validate.small_models import prompt, small_model
from validate.reference import model as model_module
from validate.reference.mla import causal_attention
from validate.reference.model import forward

K3 = k3_config(num_hidden_layers=4)
LINEAR = kimi_linear_config(num_hidden_layers=4)


class Tracking:
    """A source that hands out copies and knows how many of their bytes are still alive."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.alive = 0
        self.peak = 0
        self.whole: set[str] = set()

    def _hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self.alive += copy.nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(copy, self._dropped, copy.nbytes)
        return copy

    def _dropped(self, n_bytes: int) -> None:
        self.alive -= n_bytes

    def __getitem__(self, name: str) -> torch.Tensor:
        self.whole.add(name)
        return self._hand_out(self.tensors[name])

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._hand_out(self.tensors[name][start:stop])


def test_shapes_of_the_output() -> None:
    config, tensors = small_model(K3)
    out = forward(tensors, config, prompt(5, config.vocab_size))
    assert out.logits.shape == (5, config.vocab_size)
    assert out.hidden.shape == (5, config.hidden_size)
    assert [tuple(layer.shape) for layer in out.layers] == [(5, config.hidden_size)] * 4
    assert {layer: tuple(ids.shape) for layer, ids in out.routing.items()} == {1: (5, 2), 2: (5, 2), 3: (5, 2)}
    assert all(bool((ids.diff(dim=1) > 0).all()) for ids in out.routing.values())


@pytest.mark.parametrize("config_json", [K3, LINEAR], ids=["k3", "kimi-linear"])
def test_later_tokens_change_nothing_before_them(config_json: dict[str, Any]) -> None:
    config, tensors = small_model(config_json)
    ids = prompt(8, config.vocab_size)
    whole = forward(tensors, config, ids, dtype=torch.float64).logits
    start = forward(tensors, config, ids[:5], dtype=torch.float64).logits
    torch.testing.assert_close(whole[:5], start, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(whole[5:], start[4], rtol=1e-2)


def test_softmax_scale_is_that_of_the_whole_query_width() -> None:
    q = torch.zeros(2, 1, 192, dtype=torch.float64)
    k = torch.zeros(2, 1, 192, dtype=torch.float64)
    q[1, 0, 0], k[1, 0, 0] = 1.0, 1.0
    share = causal_attention(q, k, torch.tensor([[[0.0]], [[1.0]]], dtype=torch.float64))[1].item()
    assert torch.logit(torch.tensor(share, dtype=torch.float64)).item() == pytest.approx(0.07216878, abs=1e-8)


def test_tensors_are_dropped_after_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "HEAD_STRIP_ROWS", 100)  # 640 rows: six whole strips and one of 40
    config, tensors = small_model(K3)
    source = Tracking(tensors)
    ids = prompt(4, config.vocab_size)
    out = forward(source, config, ids)
    assert torch.equal(out.logits, forward(tensors, config, ids).logits)
    assert source.alive == 0
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & source.whole
    largest = max(tensor.nbytes for name, tensor in tensors.items() if name in source.whole)
    assert source.peak <= 2 * largest


@pytest.mark.parametrize("config_json", [K3, LINEAR], ids=["k3", "kimi-linear"])
def test_every_tensor_is_needed_and_named_when_missing(config_json: dict[str, Any]) -> None:
    config, tensors = small_model(config_json)
    chosen = forward(tensors, config, [1]).routing
    unused = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    for name in sorted(tensors.keys() - unused):
        layer, _, rest = name.removeprefix("model.layers.").partition(".block_sparse_moe.experts.")
        is_vision = not name.startswith(("model.", "lm_head."))
        if is_vision or (rest and int(rest.split(".")[0]) not in chosen[int(layer)].flatten()):
            continue  # the text model has no use for it
        with pytest.raises(CheckError, match=rf"tensor `{name}`.* is missing, expected with shape \["):
            forward({key: value for key, value in tensors.items() if key != name}, config, [1])


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("model.layers.0.self_attn.q_conv1d.weight", (256, 1, 3), r"\[256, 1, 4\]"),
        ("model.layers.0.self_attn.A_log", (5,), r"\[1, 1, 4, 1\] or \[128\] or \[4\]"),
        ("model.layers.0.mlp.down_proj.weight", (512, 256), r"\[256, 512\]"),
        ("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (9,), r"\[8\]"),
        ("model.layers.1.mlp_res_proj.weight", (256,), r"\[1, 256\]"),
        ("model.layers.3.self_attn.kv_b_proj.weight", (511, 64), r"\[512, 64\]"),
        ("model.embed_tokens.weight", (640, 255), r"\[1, 256\]"),
        ("lm_head.weight", (639, 256), r"\[640, 256\]"),
    ],
)
def test_wrong_shapes_are_named(name: str, found: tuple[int, ...], expected: str) -> None:
    config, tensors = small_model(K3)
    with pytest.raises(CheckError, match=rf"tensor `{name}`.* has shape \[.*\], expected {expected}"):
        forward(tensors | {name: torch.zeros(found)}, config, [1, 2])


def test_ids_are_checked() -> None:
    config, tensors = small_model(K3)
    with pytest.raises(CheckError, match="no token ids"):
        forward(tensors, config, [])
    for token in (-1, config.vocab_size):
        with pytest.raises(CheckError, match=rf"token id {token} is outside the vocabulary \(0 to 639\)"):
            forward(tensors, config, [0, token])
