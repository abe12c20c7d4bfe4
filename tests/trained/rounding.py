"""The weights as they will be stored, for a forward pass; gradients pass through the rounding unchanged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.checkpoints.mxfp4 import GROUP, LARGEST_EXPONENT
from tests.trained.parameters import EXPERTS, is_bf16

LARGEST = 6.0
SMALLEST = 2.0**-100  # below it a group's scale does not matter
MANTISSA_STEPS = 2  # per power of two: E2M1 has one bit of mantissa


def rounded(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts rounded to MXFP4, the trunk to bf16, what the release keeps in f32 as it is."""
    return {name: _straight_through(name, parameter) for name, parameter in parameters.items()}


def _straight_through(name: str, parameter: Tensor) -> Tensor:
    if EXPERTS.fullmatch(name):
        stored = mxfp4_values(parameter.detach())
    elif is_bf16(name):
        stored = parameter.detach().to(torch.bfloat16).to(torch.float32)
    else:
        return parameter
    return parameter + (stored - parameter).detach()


def mxfp4_values(weights: Tensor) -> Tensor:
    """[..., cols] to the values that `pack_mxfp4` stores: its scale, the nearest E2M1 number, ties to even codes."""
    groups = weights.reshape(*weights.shape[:-1], -1, GROUP)
    scale = _power_below(groups.abs().amax(-1, keepdim=True).clamp_min(SMALLEST)) / 2**LARGEST_EXPONENT
    scaled = (groups / scale).clamp(-LARGEST, LARGEST)
    step = _power_below(scaled.abs().clamp_min(1.0)) / MANTISSA_STEPS
    values: Tensor = torch.round(scaled / step) * step * scale
    return values.reshape(weights.shape)


def _power_below(x: Tensor) -> Tensor:
    """The largest power of two that is not above x > 0."""
    _, exponent = torch.frexp(x)  # x = mantissa · 2^exponent with 0.5 <= mantissa < 1
    power: Tensor = torch.ldexp(torch.full_like(x, 0.5), exponent)
    return power
