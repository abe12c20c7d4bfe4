"""Every stored number format back to f32, from raw bytes, by code that shares nothing with the encoder.

Checkpoint encodings: F32, F16, BF16 and MXFP4 pairs. Container: trunk formats F32, Q8G and Q4G, and the expert
formats VQ3R, VQ2R and VQ4P (docs/FORMAT.md). Input is uint8 numpy arrays as read, output is f32 torch tensors.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from container.errors import FormatError, ShardError, WeightError
from container.layout import ExpertFormat, TrunkFormat

Bytes = npt.NDArray[np.uint8]

SOURCE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

MXFP4_GROUP = 32  # weights of one row that share a scale
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits; bit 3 is the sign
E8M0_BIAS = 127
E8M0_NAN = 255

TRUNK_GROUP = 128  # weights of one row that share a group scale

TILE_ROWS = 64
VECTOR = 8
N_STAGES = {ExpertFormat.VQ3R: 3, ExpertFormat.VQ2R: 2, ExpertFormat.VQ4P: 4}
VECTOR_BYTES = {ExpertFormat.VQ3R: 3, ExpertFormat.VQ2R: 2, ExpertFormat.VQ4P: 3}


def decode_plain(raw: Bytes, dtype: str, shape: tuple[int, ...], name: str) -> Tensor:
    """A safetensors F32, F16 or BF16 tensor, little-endian, as f32 of `shape`.

    Raises ShardError for another dtype or a byte count that does not fit, WeightError for NaN or infinity.
    """
    if dtype not in SOURCE_DTYPES:
        raise ShardError(f"reference: tensor `{name}` has dtype {dtype}, expected one of {', '.join(SOURCE_DTYPES)}")
    stored = SOURCE_DTYPES[dtype]
    _expect_bytes(raw, math.prod(shape) * stored.itemsize, f"tensor `{name}`", ShardError)
    decoded = _as(raw, stored).to(torch.float32).reshape(shape)
    if not bool(torch.isfinite(decoded).all()):
        raise WeightError(f"reference: tensor `{name}` holds NaN or infinity; the checkpoint is damaged or unusable")
    return decoded


def decode_mxfp4(packed: Bytes, scale: Bytes, name: str) -> Tensor:
    """Packed E2M1 [rows, cols / 2] and E8M0 scales [rows, cols / 32], both uint8, to f32 [rows, cols].

    The low nibble is the even column. Scale byte e means 2^(e - 127), e = 0 included (OCP MX 1.0). Raises
    ShardError for shapes that do not belong together, WeightError for scale byte 255 (NaN) and for overflow of f32.
    """
    rows, half_cols = packed.shape
    if scale.shape != (rows, 2 * half_cols // MXFP4_GROUP) or 2 * half_cols % MXFP4_GROUP:
        raise ShardError(
            f"reference: MXFP4 tensor `{name}` has packed shape {list(packed.shape)} and scale shape "
            f"{list(scale.shape)}, expected one scale for {MXFP4_GROUP} columns (two columns per packed byte)"
        )
    if bool((scale == E8M0_NAN).any()):
        raise WeightError(f"reference: MXFP4 tensor `{name}` has scale byte 255 (NaN); the checkpoint is damaged")
    values = np.empty((rows, 2 * half_cols), dtype=np.float32)
    values[:, 0::2] = _e2m1(packed % 16)
    values[:, 1::2] = _e2m1(packed // 16)
    exponents = np.repeat(scale.astype(np.int32) - E8M0_BIAS, MXFP4_GROUP, axis=1)
    with np.errstate(over="ignore"):  # refused with the tensor's name below
        decoded = np.ldexp(values, exponents)
    if not np.isfinite(decoded).all():
        raise WeightError(f"reference: MXFP4 tensor `{name}` holds values above the range of f32")
    return torch.from_numpy(decoded)


def trunk_row_bytes(fmt: TrunkFormat, n_cols: int) -> tuple[int, int]:
    """Bytes of one row's values and of one row's group scales."""
    if fmt is TrunkFormat.F32:
        return 4 * n_cols, 0
    n_groups = -(-n_cols // TRUNK_GROUP)
    bits = 8 if fmt is TrunkFormat.Q8G else 4
    return n_groups * TRUNK_GROUP * bits // 8, 2 * n_groups


def decode_trunk_rows(fmt: TrunkFormat, values: Bytes, scales: Bytes, n_cols: int) -> Tensor:
    """Whole rows of a trunk tensor to f32 [rows, n_cols]: flat value bytes, and flat bytes of the f16 group scales.

    Q8G: int8 × scale. Q4G: nibble - 8, low nibble first, × scale. Rows are padded to whole groups, which are cut off.
    Raises FormatError when the byte counts do not fit together.
    """
    value_bytes, scale_bytes = trunk_row_bytes(fmt, n_cols)
    n_rows = values.size // value_bytes
    _expect_bytes(values, n_rows * value_bytes, f"{fmt.name} values", FormatError)
    _expect_bytes(scales, n_rows * scale_bytes, f"{fmt.name} group scales", FormatError)
    if fmt is TrunkFormat.F32:
        return _as(values, torch.float32).reshape(n_rows, n_cols)
    if fmt is TrunkFormat.Q8G:
        integers = _as(values, torch.int8).to(torch.float32)
    else:
        pairs = _as(values, torch.uint8)
        integers = torch.stack([pairs & 15, pairs >> 4], dim=1).to(torch.float32) - 8
    n_groups = scale_bytes // 2
    by_group = integers.reshape(n_rows, n_groups, TRUNK_GROUP)
    group_scales = _as(scales, torch.float16).to(torch.float32).reshape(n_rows, n_groups, 1)
    return (by_group * group_scales).flatten(1)[:, :n_cols].contiguous()


def decode_indices(fmt: ExpertFormat, raw: Bytes, shape: tuple[int, int]) -> Tensor:
    """Tiled index bytes of a matrix [rows, cols] to entry numbers, int64 [stages, rows, cols / 8].

    The bytes of vector v of row r stand at ((r // 64 · vectors + v) · 64 + r mod 64) · bytes per vector.
    Raises FormatError when the byte count does not fit the shape.
    """
    rows, n_vectors = shape[0], shape[1] // VECTOR
    width = VECTOR_BYTES[fmt]
    n_tiles = -(-rows // TILE_ROWS)
    _expect_bytes(
        raw, n_tiles * TILE_ROWS * n_vectors * width, f"{fmt.name} indices of {rows} × {shape[1]}", FormatError
    )
    row = torch.arange(rows)[:, None]
    vector = torch.arange(n_vectors)[None, :]
    position = ((row // TILE_ROWS * n_vectors + vector) * TILE_ROWS + row % TILE_ROWS) * width
    flat = _as(raw, torch.uint8).to(torch.int64)
    parts = [flat[position + i] for i in range(width)]
    if fmt is not ExpertFormat.VQ4P:
        return torch.stack(parts)
    word = parts[0] + 256 * parts[1] + 65536 * parts[2]  # four 6-bit numbers, stage 0 lowest
    return torch.stack([word // 64**stage % 64 for stage in range(N_STAGES[fmt])])


def decode_expert_matrix(
    fmt: ExpertFormat,
    raw: Bytes,
    codebooks: npt.NDArray[np.float16],
    scales: npt.NDArray[np.float16],
    shape: tuple[int, int],
) -> Tensor:
    """One expert matrix to f32 [rows, cols]: W[r, 8v:8v+8] = scale[r] · Σ_stage codebook[stage][index].

    `codebooks` are this kind's, [stages, entries, 8]; `scales` [rows]. Raises FormatError when the sizes do
    not fit together or an index points past its codebook.
    """
    what = f"reference: {fmt.name} matrix of {shape[0]} × {shape[1]}"
    if codebooks.shape[0] != N_STAGES[fmt] or codebooks.shape[2] != VECTOR or scales.shape != shape[:1]:
        raise FormatError(
            f"{what}: expected codebooks [{N_STAGES[fmt]}, entries, {VECTOR}] and {shape[0]} channel scales, "
            f"found {list(codebooks.shape)} and {list(scales.shape)}"
        )
    indices = decode_indices(fmt, raw, shape)
    if indices.numel() and int(indices.max()) >= codebooks.shape[1]:
        raise FormatError(f"{what}: index {int(indices.max())}, but the codebooks have {codebooks.shape[1]} entries")
    entries = torch.from_numpy(codebooks.astype(np.float32))
    total = torch.zeros(*indices.shape[1:], VECTOR)
    for stage, chosen in enumerate(indices):
        total += entries[stage][chosen]
    return total.reshape(shape) * torch.from_numpy(scales.astype(np.float32))[:, None]


def _e2m1(nibbles: Bytes) -> npt.NDArray[np.float32]:
    signs = np.where(nibbles >= 8, np.float32(-1), np.float32(1))
    return signs * np.array(E2M1_MAGNITUDES, dtype=np.float32)[nibbles % 8]


def _as(raw: Bytes, dtype: torch.dtype) -> Tensor:
    """Flat bytes, copied so that read-only and unaligned ones serve too, as a flat tensor of `dtype`."""
    return torch.from_numpy(np.array(raw, dtype=np.uint8).reshape(-1)).view(dtype)


def _expect_bytes(raw: Bytes, n_bytes: int, what: str, error: type[FormatError] | type[ShardError]) -> None:
    if raw.size != n_bytes:
        raise error(f"reference: {what} take {n_bytes} bytes, found {raw.size}")
