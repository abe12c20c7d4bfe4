"""Seeded weights for an inventory, and the float32 meaning of stored tensors.

Values keep a forward pass well conditioned: matrices preserve the size of what they multiply, norms are near 1,
decays are moderate, and router scores lie far enough apart that rounding does not change a choice.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from container.model import ModelConfig, canonical_config
from tests.checkpoints.inventory import TensorSpec, tensor_table
from tests.checkpoints.mxfp4 import pack_mxfp4, unpack_mxfp4

NUMPY_DTYPES: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8}
ROW_SPREAD = 0.2  # rows of a matrix differ in size by about this factor, so that row scales matter


def checkpoint_tensors(
    config: Mapping[str, Any], *, seed: int = 0, resident_mxfp4: bool = False
) -> dict[str, NDArray[Any]]:
    """Every tensor of the checkpoint that `config` describes, under its on-disk name, shape and dtype.

    bf16 arrays have ml_dtypes' bfloat16; a tensor's values depend on its name and the seed alone.
    """
    return dict(iter_tensors(config, tensor_table(config, resident_mxfp4=resident_mxfp4), seed=seed))


def iter_tensors(
    config: Mapping[str, Any], table: Iterable[TensorSpec], *, seed: int
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of `table` in its order, made one at a time; MXFP4 pairs must stand together, bytes first."""
    n_heads = ModelConfig.from_config(canonical_config(config)).kda.n_heads
    specs = iter(table)
    for spec in specs:
        if spec.name.endswith(".weight_packed"):
            rows, half = spec.shape
            name = spec.name.removesuffix("_packed")
            packed, scale = pack_mxfp4(_values(name, (rows, 2 * half), _rng(name, seed)))
            yield spec.name, packed
            yield next(specs).name, scale
        elif spec.name.endswith(".A_log"):
            yield spec.name, _a_log(spec.shape, n_heads, _rng(spec.name, seed))
        else:
            values = _values(spec.name, spec.shape, _rng(spec.name, seed))
            yield spec.name, values.astype(NUMPY_DTYPES[spec.dtype])


def logical_tensor(tensors: Mapping[str, NDArray[Any]], name: str) -> NDArray[np.float32]:
    """The float32 values of `name` (for instance `….w1.weight`), stored plain or as an MXFP4 pair.

    Raises KeyError when `tensors` holds neither.
    """
    if name in tensors:
        return tensors[name].astype(np.float32)
    return unpack_mxfp4(tensors[name + "_packed"], tensors[name + "_scale"])


def matrix_size(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of a matrix's weights: 1 for the embedding, whose rows are looked up."""
    if name.endswith("embed_tokens.weight"):
        return 1.0
    return float(prod(shape[1:]) ** -0.5) * (2.0 if name.endswith(".gate.weight") else 1.0)


def _rng(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    if name.endswith("e_score_correction_bias"):
        return rng.permutation(np.linspace(-0.1, 0.1, shape[0])).astype(np.float32)
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("dt_bias"):
        return values * np.float32(0.5) - np.float32(1.5)
    if len(shape) == 1:
        return values * np.float32(0.1) + np.float32(1)
    if name.endswith("embed_tokens.weight"):
        return values
    spread = np.exp(ROW_SPREAD * rng.standard_normal((shape[0], *(1,) * (len(shape) - 1))))
    values *= (matrix_size(name, shape) * spread).astype(np.float32)
    return values


def _a_log(shape: tuple[int, ...], n_heads: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """One value per head; K3's padding behind them is zero."""
    padded = np.zeros(shape, dtype=np.float32)
    padded.reshape(-1)[:n_heads] = rng.uniform(-1.0, 1.0, n_heads)
    return padded
