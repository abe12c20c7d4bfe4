"""Delta attention: gates, convolution and recurrence, against fla and against figures worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from container.errors import CheckError
from tests.checkpoints import k3_config, kimi_linear_config
from tests.validate.small_models import fla_module, prompt, relative_errors, small_model
from validate.reference.kda import (
    bounded_log_decay,
    delta_recurrence,
    l2_norm,
    short_convolution,
    softplus_log_decay,
)
from validate.reference.model import forward


@pytest.mark.parametrize(
    ("a_log", "z", "bounded", "softplus"),
    [
        (0.0, 0.0, -2.5, -0.693147),
        (1.0, -1.0, -0.309516, -0.851534),
        (-1.0, 2.0, -3.380339, -0.782453),
        (2.5, 0.3, -4.873921, -10.408178),
    ],
)
def test_gate_spot_values(a_log: float, z: float, bounded: float, softplus: float) -> None:
    a, x = torch.tensor(a_log), torch.tensor(z)
    assert bounded_log_decay(a, x, -5.0).item() == pytest.approx(bounded, abs=1e-6)
    assert softplus_log_decay(a, x).item() == pytest.approx(softplus, abs=1e-6)


def test_gates_stay_finite_far_out() -> None:
    z = torch.tensor([-1e4, -100.0, 100.0, 1e4])
    assert bounded_log_decay(torch.tensor(3.0), z, -5.0).tolist() == [0.0, 0.0, -5.0, -5.0]
    assert softplus_log_decay(torch.tensor(0.0), z).tolist() == [0.0, pytest.approx(0.0, abs=1e-30), -100.0, -1e4]


def test_recurrence_against_fla() -> None:
    naive = fla_module("ops", "kda", "naive.py").naive_recurrent_kda
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(40, 3, 16, generator=generator) for _ in range(3))
    q, k = l2_norm(q), l2_norm(k)
    g = -5 * torch.rand(40, 3, 16, generator=generator) ** 3
    beta = torch.rand(40, 3, generator=generator)
    out, state = delta_recurrence(q * 16**-0.5, k, v, g, beta)
    expected, expected_state = naive(q[None], k[None], v[None], g[None], beta[None], output_final_state=True)
    assert max(relative_errors(out, expected[0])) <= 1e-6
    assert max(relative_errors(state, expected_state[0])) <= 1e-6


def test_recurrence_by_hand() -> None:
    # One head of size 1. t0: S = 0.5·2·1 = 1, o = 3. t1: S ← e^-1; d = 1·(1 - 2/e); S = 1/e + 2(1 - 2/e); o = S.
    q, k, v = (torch.tensor(x, dtype=torch.float64).view(2, 1, 1) for x in ([3.0, 1.0], [1.0, 2.0], [2.0, 1.0]))
    g = torch.tensor([-7.0, -1.0], dtype=torch.float64).view(2, 1, 1)
    beta = torch.tensor([0.5, 1.0], dtype=torch.float64).view(2, 1)
    out, state = delta_recurrence(q, k, v, g, beta)
    last = 1 / math.e + 2 * (1 - 2 / math.e)
    assert out.flatten().tolist() == pytest.approx([3.0, last], abs=1e-15)
    assert state.item() == pytest.approx(last, abs=1e-15)


def test_last_tap_meets_the_current_token() -> None:
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [5.0, 50.0]])
    taps = torch.tensor([[1000.0, 100.0, 10.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    expected = [[1.0, 10.0], [12.0, 20.0], [123.0, 30.0], [1234.0, 40.0], [2345.0, 50.0]]
    assert short_convolution(x, taps).tolist() == expected


def test_l2_norm_adds_to_the_sum_of_squares() -> None:
    small = torch.tensor([1e-3, 0.0], dtype=torch.float64)
    assert l2_norm(small).tolist() == pytest.approx([2**-0.5, 0.0], rel=1e-12)
    assert l2_norm(torch.zeros(4)).tolist() == [0.0] * 4


def test_padded_a_log_is_cut_and_its_tail_must_be_zero() -> None:
    config, tensors = small_model(k3_config(num_hidden_layers=2))
    name = "model.layers.0.self_attn.A_log"
    assert tensors[name].shape == (128,)
    ids = prompt(3, config.vocab_size)
    plain = forward(tensors | {name: tensors[name][: config.kda.n_heads]}, config, ids)
    assert torch.equal(forward(tensors, config, ids).logits, plain.logits)
    tail = tensors[name].clone()
    tail[config.kda.n_heads] = 0.25
    with pytest.raises(CheckError, match=rf"`{name}` must be zero after its first 4 entries .* found 1 non-zero"):
        forward(tensors | {name: tail}, config, ids)


@pytest.mark.parametrize(("name", "shape"), [("A_log", (1, 4)), ("q_conv1d.weight", (256, 4))])
def test_flattened_tensors_of_other_writers(name: str, shape: tuple[int, ...]) -> None:
    config, tensors = small_model(kimi_linear_config(num_hidden_layers=2))
    name = f"model.layers.0.self_attn.{name}"
    ids = prompt(3, config.vocab_size)
    flat = forward(tensors | {name: tensors[name].reshape(shape)}, config, ids)
    assert torch.equal(flat.logits, forward(tensors, config, ids).logits)
