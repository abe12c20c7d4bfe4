"""How the reference gets its weights: by name, when they are needed, checked, and kept only where asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from container.errors import CheckError


@runtime_checkable
class TensorSource(Protocol):
    """Tensors by release name without the checkpoint's prefix (`model.norm.weight`, `lm_head.weight`)."""

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor, decoded to floating point; raises KeyError when there is none of that name."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of a matrix, as a slice gives them: fewer at the end. Raises KeyError likewise."""
        ...


class MappingTensors:
    """A `TensorSource` over tensors that are already in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of matrix `name`."""
        return self.tensors[name][start:stop]


class KeptTensors:
    """A `TensorSource` that reads and decodes each tensor of another once, for a model that fits in memory."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._kept:
            self._kept[name] = self.source[name]
        return self._kept[name]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of matrix `name`, all of which is kept."""
        return self[name][start:stop]


class Weights:
    """The tensors under one name prefix, with shapes checked and values in the dtype of the calculation."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, prefix: str = "") -> None:
        self.source = source
        self.dtype = dtype
        self.prefix = prefix

    def under(self, prefix: str) -> Weights:
        """The same tensors seen from a longer prefix."""
        return Weights(self.source, self.dtype, self.prefix + prefix)

    def fetch(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """The tensor `name`, which must have one of `shapes`; CheckError when it is missing or has another."""
        full_name = self.prefix + name
        return self._checked(lambda: self.source[full_name], f"`{full_name}`", shapes)

    def rows(self, name: str, start: int, stop: int, n_cols: int) -> Tensor:
        """Rows [stop - start, n_cols] of a matrix; CheckError when it is missing, too short or of another width."""
        full_name = self.prefix + name
        label = f"`{full_name}` (rows {start} to {stop - 1})"
        return self._checked(lambda: self.source.rows(full_name, start, stop), label, ((stop - start, n_cols),))

    def linear(self, x: Tensor, name: str, n_out: int) -> Tensor:
        """x @ Wᵀ without bias: [..., n_in] to [..., n_out], W the tensor `name`.weight of shape [n_out, n_in]."""
        return x @ self.fetch(f"{name}.weight", (n_out, x.shape[-1])).T

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMS norm over the last dimension with the tensor `name`.weight."""
        return rms_norm(x, self.fetch(f"{name}.weight", (x.shape[-1],)), eps)

    def _checked(self, fetch: Callable[[], Tensor], label: str, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        try:
            tensor = fetch()
        except KeyError as error:
            raise CheckError(f"reference: tensor {label} is missing, expected with shape {expected}") from error
        if tuple(tensor.shape) not in shapes:
            raise CheckError(f"reference: tensor {label} has shape {list(tensor.shape)}, expected {expected}")
        return tensor.to(self.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, wholly in the dtype of x."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
