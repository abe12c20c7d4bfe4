"""Decoding against bytes written by hand, against other libraries, and against the container's own packers."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from container.errors import FormatError, ShardError, WeightError
from container.indices import pack_indices
from container.layout import EXPERT_QUANTS, ExpertFormat, TrunkFormat
from container.trunk import pack_rows, unpack_rows
from validate.reference.decode import (
    decode_expert_matrix,
    decode_indices,
    decode_mxfp4,
    decode_plain,
    decode_trunk_rows,
    trunk_row_bytes,
)

ALL_CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def raw(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)


# checkpoint encodings


def test_plain_golden_bytes() -> None:
    assert decode_plain(raw(0x80, 0x3F, 0x00, 0xC0), "BF16", (2,), "w").tolist() == [1.0, -2.0]
    assert decode_plain(raw(0x00, 0x3C, 0x01, 0x00), "F16", (2, 1), "w").tolist() == [[1.0], [2.0**-24]]
    found = decode_plain(raw(0x00, 0x00, 0x20, 0x3E, 0x01, 0x00, 0x00, 0x00), "F32", (1, 2), "w")
    assert found.dtype == torch.float32
    assert found.tolist() == [[0.15625, 2.0**-149]]


def test_every_finite_bf16_and_f16() -> None:
    words = np.arange(65536, dtype="<u2")
    for dtype, oracle in (("BF16", ml_dtypes.bfloat16), ("F16", np.float16)):
        expected = words.view(oracle).astype(np.float32)
        finite = np.isfinite(expected)
        found = decode_plain(words[finite].view(np.uint8), dtype, (int(finite.sum()),), "w").numpy()
        assert np.array_equal(found.view(np.uint32), expected[finite].view(np.uint32))


@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC0])
def test_plain_nan_and_infinity_are_refused(word: int) -> None:
    with pytest.raises(WeightError, match=r"tensor `model\.w` holds NaN or infinity"):
        decode_plain(np.array([0, word], dtype="<u2").view(np.uint8), "BF16", (2,), "model.w")


def test_plain_of_other_dtype_or_size_is_refused() -> None:
    with pytest.raises(ShardError, match="`w` has dtype I32, expected one of F32, F16, BF16"):
        decode_plain(raw(0, 0, 0, 0), "I32", (1,), "w")
    with pytest.raises(ShardError, match="tensor `w` take 4 bytes, found 3"):
        decode_plain(raw(0, 0, 0), "F32", (1,), "w")


def test_mxfp4_golden_bytes() -> None:
    packed = np.tile(raw(0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE), 4)[None]  # all codes, four times
    found = decode_mxfp4(packed, raw(127, 129)[None], "w")
    assert found.dtype == torch.float32
    expected = torch.tensor(ALL_CODES * 2 + [4 * value for value in ALL_CODES * 2])
    assert torch.equal(found[0], expected)
    assert torch.equal(torch.signbit(found[0]), torch.signbit(expected))


def test_mxfp4_extreme_scales() -> None:
    packed = np.full((1, 16), 0x71, dtype=np.uint8)  # 0.5 and 6 in turn
    assert decode_mxfp4(packed, raw(0)[None], "w")[0, :2].tolist() == [2.0**-128, 1.5 * 2.0**-125]
    assert decode_mxfp4(packed, raw(252)[None], "w")[0, :2].tolist() == [2.0**124, 1.5 * 2.0**127]
    with pytest.raises(WeightError, match="`w` holds values above the range of f32"):
        decode_mxfp4(packed, raw(253)[None], "w")
    with pytest.raises(WeightError, match=r"`w` has scale byte 255 \(NaN\)"):
        decode_mxfp4(np.zeros_like(packed), raw(255)[None], "w")


@pytest.mark.parametrize(
    ("packed", "scale"), [((2, 16), (2, 2)), ((2, 16), (1, 1)), ((2, 24), (2, 1)), ((2, 8), (2, 0))]
)
def test_mxfp4_pairs_that_do_not_fit_are_refused(packed: tuple[int, int], scale: tuple[int, int]) -> None:
    with pytest.raises(ShardError, match="MXFP4 tensor `w` has packed shape"):
        decode_mxfp4(np.zeros(packed, dtype=np.uint8), np.zeros(scale, dtype=np.uint8), "w")


def random_mxfp4() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    packed = rng.integers(0, 256, (253, 48), dtype=np.uint8)
    scale = np.stack([rng.permutation(253) for _ in range(3)], axis=1).astype(np.uint8)  # 0 to 252
    return packed, scale


def test_mxfp4_against_compressed_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # third-party deprecations at import
        from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    packed, scale = random_mxfp4()
    weights = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True)
    state = {"weight_packed": torch.from_numpy(packed), "weight_scale": torch.from_numpy(scale)}
    theirs = MXFP4PackedCompressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=weights))["weight"]
    assert torch.equal(decode_mxfp4(packed, scale, "w"), theirs.to(torch.float32))


def test_mxfp4_against_ml_dtypes() -> None:
    packed, scale = random_mxfp4()
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    expected = values * np.repeat(scales, 32, axis=1)
    assert np.array_equal(decode_mxfp4(packed, scale, "w").numpy().astype(np.float64), expected)


# trunk formats


def test_q8g_golden_bytes() -> None:
    values = np.zeros((2, 256), dtype=np.uint8)
    values[0, [0, 1, 127, 128]] = raw(1, 0xFF, 127, 2)
    values[1, [0, 129]] = raw(0x81, 3)
    scales = raw(0x00, 0x38, 0x00, 0x40, 0x00, 0x3C, 0x00, 0xC4)  # 0.5, 2; 1, -4
    found = decode_trunk_rows(TrunkFormat.Q8G, values.reshape(-1), scales, 130)
    expected = torch.zeros(2, 130)
    expected[0, [0, 1, 127, 128]] = torch.tensor([0.5, -0.5, 63.5, 4.0])
    expected[1, [0, 129]] = torch.tensor([-127.0, -12.0])
    assert torch.equal(found, expected)


def test_q4g_golden_bytes() -> None:
    values = np.full((1, 128), 0x88, dtype=np.uint8)
    values[0, 0], values[0, 1], values[0, 64] = 0x9F, 0x08, 0xA7
    found = decode_trunk_rows(TrunkFormat.Q4G, values.reshape(-1), raw(0x00, 0x40, 0x00, 0x3C), 131)
    expected = torch.zeros(1, 131)
    expected[0, :4] = torch.tensor([14.0, 2.0, 0.0, -16.0])
    expected[0, 128:130] = torch.tensor([-1.0, 2.0])
    assert torch.equal(found, expected)


def test_f32_golden_bytes() -> None:
    found = decode_trunk_rows(TrunkFormat.F32, raw(0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0), raw(), 1)
    assert found.tolist() == [[1.0], [-2.0]]


@given(
    seed=st.integers(0, 2**32 - 1),
    n_rows=st.integers(1, 5),
    n_cols=st.sampled_from([1, 127, 128, 129, 300]),
    fmt=st.sampled_from(list(TrunkFormat)),
)
def test_trunk_rows_against_the_packer(seed: int, n_rows: int, n_cols: int, fmt: TrunkFormat) -> None:
    rows = np.random.default_rng(seed).standard_normal((n_rows, n_cols), dtype=np.float32)
    values, scales = pack_rows(rows, fmt)
    found = decode_trunk_rows(fmt, values.reshape(-1), scales.view(np.uint8).reshape(-1), n_cols)
    assert np.array_equal(found.numpy(), unpack_rows(values, scales, n_cols, fmt))
    assert (values.shape[1], 2 * scales.shape[1]) == trunk_row_bytes(fmt, n_cols)


@pytest.mark.parametrize("fmt", [TrunkFormat.Q8G, TrunkFormat.Q4G])
def test_trunk_bytes_that_do_not_fit_are_refused(fmt: TrunkFormat) -> None:
    value_bytes, _ = trunk_row_bytes(fmt, 130)
    values = np.zeros(2 * value_bytes, dtype=np.uint8)
    with pytest.raises(FormatError, match=f"{fmt.name} values take"):
        decode_trunk_rows(fmt, values[1:], np.zeros(8, dtype=np.uint8), 130)
    with pytest.raises(FormatError, match=f"{fmt.name} group scales take 8 bytes, found 4"):
        decode_trunk_rows(fmt, values, np.zeros(4, dtype=np.uint8), 130)


# expert formats


def test_vq3r_golden_bytes() -> None:
    data = np.zeros(2 * 2 * 64 * 3, dtype=np.uint8)  # 2 tiles of 64 rows, 2 vectors
    data[0:6] = raw(1, 2, 3, 4, 5, 6)  # vector 0 of rows 0 and 1
    data[192:195] = raw(7, 8, 255)  # vector 1 of row 0
    data[384:387] = raw(9, 10, 11)  # vector 0 of row 64
    data[576 + 3 : 576 + 6] = raw(12, 13, 14)  # vector 1 of row 65
    found = decode_indices(ExpertFormat.VQ3R, data, (66, 16))
    assert found.shape == (3, 66, 2)
    expected = torch.zeros(3, 66, 2, dtype=torch.int64)
    for row, vector, stages in ((0, 0, (1, 2, 3)), (1, 0, (4, 5, 6)), (0, 1, (7, 8, 255)), (64, 0, (9, 10, 11))):
        expected[:, row, vector] = torch.tensor(stages)
    expected[:, 65, 1] = torch.tensor((12, 13, 14))
    assert torch.equal(found, expected)


def test_vq4p_golden_bytes() -> None:
    data = np.zeros(64 * 3, dtype=np.uint8)
    data[:6] = raw(0x81, 0x30, 0x10, 0xBF, 0xDF, 0xF3)
    found = decode_indices(ExpertFormat.VQ4P, data, (2, 8))
    assert found[:, 0, 0].tolist() == [1, 2, 3, 4]
    assert found[:, 1, 0].tolist() == [63, 62, 61, 60]


def test_expert_matrix_by_hand() -> None:
    codebooks = np.zeros((2, 256, 8), dtype=np.float16)
    codebooks[0, 3] = np.arange(8)
    codebooks[1, 200] = 0.5
    codebooks[1, 0] = 100  # what padding points at
    data = np.zeros(64 * 2, dtype=np.uint8)
    data[:4] = raw(3, 200, 0, 200)
    scales = np.array([2, -1], dtype=np.float16)
    found = decode_expert_matrix(ExpertFormat.VQ2R, data, codebooks, scales, (2, 8))
    assert found.tolist() == [[1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0], [-0.5] * 8]


@given(
    seed=st.integers(0, 2**32 - 1),
    fmt=st.sampled_from(list(ExpertFormat)),
    rows=st.sampled_from([1, 63, 64, 65, 130]),
    n_vectors=st.integers(1, 4),
)
def test_expert_matrix_against_a_loop(seed: int, fmt: ExpertFormat, rows: int, n_vectors: int) -> None:
    quant, rng = EXPERT_QUANTS[fmt], np.random.default_rng(seed)
    codes = rng.integers(0, quant.n_entries, (rows, n_vectors, quant.n_stages), dtype=np.uint8)
    codebooks = rng.standard_normal((quant.n_stages, quant.n_entries, 8)).astype(np.float16)
    scales = rng.standard_normal(rows).astype(np.float16)
    data = pack_indices(codes, quant)
    assert np.array_equal(decode_indices(fmt, data, (rows, 8 * n_vectors)).numpy(), np.moveaxis(codes, -1, 0))
    found = decode_expert_matrix(fmt, data, codebooks, scales, (rows, 8 * n_vectors)).numpy()
    for row in {0, rows // 2, rows - 1}:
        for v in range(n_vectors):
            parts = [codebooks[s, codes[row, v, s]].astype(np.float64) for s in range(quant.n_stages)]
            expected = float(scales[row]) * sum(parts)
            np.testing.assert_allclose(found[row, 8 * v : 8 * v + 8], expected, rtol=1e-5, atol=1e-6)


def test_expert_parts_that_do_not_fit_are_refused() -> None:
    data, scales = np.full(64 * 3, 250, dtype=np.uint8), np.ones(2, dtype=np.float16)
    books = np.zeros((3, 256, 8), dtype=np.float16)
    assert decode_expert_matrix(ExpertFormat.VQ3R, data, books, scales, (2, 8)).shape == (2, 8)
    with pytest.raises(FormatError, match="VQ3R indices of 65 × 8 take 384 bytes, found 192"):
        decode_expert_matrix(ExpertFormat.VQ3R, data, books, np.ones(65, dtype=np.float16), (65, 8))
    with pytest.raises(FormatError, match=r"VQ3R matrix of 2 × 8: index 250, but the codebooks have 200 entries"):
        decode_expert_matrix(ExpertFormat.VQ3R, data, books[:, :200], scales, (2, 8))
    with pytest.raises(FormatError, match=r"expected codebooks \[3, entries, 8\] and 2 channel scales"):
        decode_expert_matrix(ExpertFormat.VQ3R, data, books[:2], scales, (2, 8))
    with pytest.raises(FormatError, match=r"and 2 channel scales, found \[3, 256, 8\] and \[3\]"):
        decode_expert_matrix(ExpertFormat.VQ3R, data, books, np.ones(3, dtype=np.float16), (2, 8))
