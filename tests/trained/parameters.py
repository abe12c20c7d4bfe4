"""Initial values of all parameters, and the names under which the reference finds them.

The routed experts of a layer are one parameter per kind, [experts, rows, cols]; every other tensor is a parameter
of its own. Names are the release's without its prefix.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from container.model import ModelConfig
from convert.arch import detect

EXPERTS = re.compile(r"model\.layers\.\d+\.block_sparse_moe\.experts\.w[123]")
ROUTER_BIAS = "gate.e_score_correction_bias"
PREFIX = "language_model."
KEPT_F32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", ROUTER_BIAS)  # not bf16 in the release
MATRIX_KINDS = {"w1": "gate", "w3": "up", "w2": "down"}

EMBEDDING_STD = 0.5
# exp(5 · sigmoid(-z)) per token: decays from about 2 to about 500 tokens long at the start
SLOWEST_Z, FASTEST_Z = -8.0, -2.0


def initial_parameters(config: dict[str, object], seed: int) -> dict[str, Tensor]:
    """Starting values in f32 for the model of a config.json; a tensor's depend on its name and the seed alone."""
    architecture = detect(config)
    model = architecture.model
    shapes = {tensor.source.removeprefix(PREFIX): tensor.shape for tensor in architecture.trunk}
    for layer in model.moe_layers:
        for matrix, kind in MATRIX_KINDS.items():
            name = f"model.layers.{layer}.block_sparse_moe.experts.{matrix}"
            shapes[name] = (model.moe.n_experts, *model.expert_shapes[kind])
    return {name: _initial(name, shape, model, seed) for name, shape in shapes.items()}


def named_views(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters as the reference asks for them: each expert's matrices by their own names."""
    views: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if EXPERTS.fullmatch(name):
            experts, _, matrix = name.rpartition(".")
            views |= {f"{experts}.{i}.{matrix}.weight": one for i, one in enumerate(parameter.unbind())}
        else:
            views[name] = parameter
    return views


def is_bf16(name: str) -> bool:
    """True for what the release stores in bf16: the trunk without a few small tensors."""
    return not (EXPERTS.fullmatch(name) or name.endswith(KEPT_F32))


def _initial(name: str, shape: tuple[int, ...], model: ModelConfig, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    if name.endswith((ROUTER_BIAS, "res_proj.weight", "A_log")):
        return torch.zeros(shape)
    if name.endswith("dt_bias"):
        return torch.empty(shape).uniform_(SLOWEST_Z, FASTEST_Z, generator=random)
    if len(shape) == 1:
        return torch.ones(shape)
    values = torch.empty(shape).normal_(generator=random)
    if name.endswith("embed_tokens.weight"):
        return values.mul_(EMBEDDING_STD)
    if name.endswith("conv1d.weight"):
        values.mul_(0.1)
        values[:, :, -1] += 1.0  # the current token
        return values
    return values.mul_(math.pow(shape[-1], -0.5)).mul_(_gain(name, model))


def _gain(name: str, model: ModelConfig) -> float:
    """Smaller starts for what is added to the residual stream, and for the head: first predictions near uniform."""
    if name.endswith("lm_head.weight"):
        return 0.5
    if name.endswith(("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")):
        return math.pow(2 * model.n_layers, -0.5)
    return 1.0
