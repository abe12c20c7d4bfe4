"""How checkpoints store numbers, against ml_dtypes and the builder's table look-up: all values, all row ranges."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from container.checkpoint import Checkpoint
from container.errors import SourceError
from container.shards import ShardTensor
from convert.encodings import ENCODINGS
from convert.encodings.mxfp4 import Mxfp4
from convert.encodings.plain import Plain
from convert.source import SourceTensor, find_encoding
from tests.checkpoints import checkpoint_tensors, logical_tensor, unpack_mxfp4, write_checkpoint
from tests.convert.small import EXPERT, small_k3

PLAIN_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)
ODD_F32 = np.array(
    [0.0, -0.0, 1.5, 1e-45, -1e-40, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan], dtype=np.float32
)


def part(name: str, dtype: str, shape: tuple[int, ...]) -> ShardTensor:
    return ShardTensor(name, dtype, shape, 0, 0)


def as_bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """So that −0 differs from 0 and NaN equals NaN."""
    return values.view(np.uint32)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_value_is_exact(dtype):
    expected = ALL_16_BITS.view(PLAIN_DTYPES[dtype]).astype(np.float32).reshape(256, 256)
    found = Plain().decode([ALL_16_BITS.view(np.uint8)], [dtype], 256, 256)
    assert found.dtype == np.float32
    finite = np.isfinite(expected)
    assert_array_equal(as_bits(found[finite]), as_bits(expected[finite]))
    assert_array_equal(found, expected)


def test_f32_passes_unchanged():
    found = Plain().decode([ODD_F32.view(np.uint8).copy()], ["F32"], 2, 5)
    assert_array_equal(as_bits(found), as_bits(ODD_F32.reshape(2, 5)))


def test_every_nibble_under_every_scale():
    """256 scale bytes × all 16 nibbles, twice each block; the oracle is the builder's own table."""
    scales = np.arange(256, dtype=np.uint8).reshape(256, 1)
    nibbles = np.tile(np.arange(16, dtype=np.uint8), 2)
    packed = np.repeat((nibbles[0::2] | nibbles[1::2] << 4)[None], 256, axis=0)
    found = Mxfp4().decode([packed.reshape(-1), scales.reshape(-1)], ["U8", "U8"], 256, 32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = unpack_mxfp4(packed, scales)
    assert np.isnan(found[255]).all()  # OCP MX: 255 is NaN, whatever the value
    assert_array_equal(as_bits(found[:255]), as_bits(expected[:255]))


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (0, [0.5 * 2.0**-127, 6 * 2.0**-127]),
        (127, [0.5, 6.0]),
        (252, [2.0**124, 6 * 2.0**125]),
        (254, [2.0**126, np.inf]),
    ],
)
def test_scale_bytes_at_the_ends(scale, expected):
    """By hand: 2^(e - 127), 0 included; 6 × 2^127 is beyond f32."""
    packed = np.full(16, 0x71, dtype=np.uint8)  # low nibble 1 (0.5), high nibble 7 (6.0)
    found = Mxfp4().decode([packed, np.array([scale], dtype=np.uint8)], ["U8", "U8"], 1, 32)
    assert found[0, :2].tolist() == pytest.approx(expected, rel=0, abs=0)


def test_the_low_nibble_is_the_even_column():
    packed = np.arange(16, dtype=np.uint8)  # low nibbles 0…15, high nibbles 0
    found = Mxfp4().decode([packed, np.array([127], dtype=np.uint8)], ["U8", "U8"], 1, 32)
    assert found[0, 0::2].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert not found[0, 1::2].any()


@given(data=st.data(), rows=st.integers(1, 9), blocks=st.integers(1, 4))
def test_row_ranges_of_mxfp4(data, rows, blocks):
    cols = 32 * blocks
    packed = data.draw(hnp.arrays(np.uint8, (rows, cols // 2)))
    scales = data.draw(hnp.arrays(np.uint8, (rows, blocks), elements=st.integers(0, 250)))
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    parts = (part("x_packed", "U8", packed.shape), part("x_scale", "U8", scales.shape))
    ranges = Mxfp4().byte_ranges(parts, (rows, cols), start, stop)
    raw = [
        array.reshape(-1)[offset : offset + n_bytes]
        for array, (offset, n_bytes) in zip((packed, scales), ranges, strict=True)
    ]
    found = Mxfp4().decode(raw, ["U8", "U8"], stop - start, cols)
    assert_array_equal(found, unpack_mxfp4(packed, scales)[start:stop])


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
@given(data=st.data())
def test_row_ranges_of_plain(dtype, data):
    rows, cols = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    values = np.arange(rows * cols).reshape(rows, cols).astype(PLAIN_DTYPES[dtype])
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    ((offset, n_bytes),) = Plain().byte_ranges((part("x", dtype, (rows, cols)),), (rows, cols), start, stop)
    raw = values.reshape(-1).view(np.uint8)[offset : offset + n_bytes]
    assert_array_equal(Plain().decode([raw], [dtype], stop - start, cols), values[start:stop].astype(np.float32))


@pytest.mark.parametrize(
    ("encoding", "parts", "shape", "expected"),
    [
        (Plain(), [("x", "I64", (2, 3))], (2, 3), ["tensor x: dtype I64, expected one of BF16, F16, F32"]),
        (Plain(), [("x", "F8_E4M3", (2, 3))], (2, 3), ["dtype F8_E4M3"]),
        (Plain(), [("x", "F32", (3, 2))], (2, 3), ["tensor x: shape [3, 2], expected [2, 3]"]),
        (Plain(), [("x", "U8", (6,))], (2, 3), ["dtype U8", "shape [6]"]),
        (Mxfp4(), [("x_packed", "U8", (2, 32)), ("x_scale", "U8", (2, 2))], (2, 64), []),
        (Mxfp4(), [("x_packed", "U8", (2, 16)), ("x_scale", "U8", (2, 2))], (2, 64), ["x_packed: shape [2, 16]"]),
        (Mxfp4(), [("x_packed", "U8", (2, 32)), ("x_scale", "F32", (2, 1))], (2, 64), ["x_scale: dtype F32", "[2, 1]"]),
        (Mxfp4(), [("x_packed", "U8", (2, 8)), ("x_scale", "U8", (2, 1))], (2, 16), ["blocks of 32"]),
        (Mxfp4(), [("x_packed", "U8", (16,)), ("x_scale", "U8", (1,))], (32,), ["blocks of 32"]),
    ],
)
def test_problems(encoding, parts, shape, expected):
    found = encoding.problems(tuple(part(*each) for each in parts), shape)
    assert len(found) == len(expected)
    assert all(text in problem for text, problem in zip(expected, found, strict=True))


def test_finding_the_encoding():
    assert find_encoding("x", {"x", "y"}).name == "plain"
    assert find_encoding("x", {"x_packed", "x_scale"}).name == "MXFP4"
    assert find_encoding("x", {"x", "x_scale"}).name == "plain"  # the stray half is reported as unknown
    for names, text in (
        ({"x", "x_packed", "x_scale"}, "tensor x: stored more than once, as plain and as MXFP4"),
        ({"x_packed"}, "tensor x: incomplete, only x_packed exists"),
        ({"x_scale"}, "tensor x: incomplete, only x_scale exists"),
        ({"y"}, "tensor x: missing"),
    ):
        with pytest.raises(SourceError, match=text):
            find_encoding("x", names)


def test_encodings_have_names_of_their_own():
    names = [encoding.name for encoding in ENCODINGS]
    assert len(set(names)) == len(names)


def test_a_source_tensor_reads_what_the_checkpoint_holds(tmp_path):
    tensors = checkpoint_tensors(small_k3())
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, small_k3(), tensors))
    expert = EXPERT.format(layer=1, expert=2, matrix="w2")
    for name in (expert, "language_model.lm_head.weight", "language_model.model.layers.0.self_attn.A_log"):
        expected = logical_tensor(tensors, name)
        source = SourceTensor.open(checkpoint, name, expected.shape)
        rows, cols = source.matrix
        assert_array_equal(source.decode(source.read()), expected.reshape(rows, cols))
        whole, half = source.read(), rows // 2
        for start, stop in ((0, half), (half, rows), (rows - 1, rows)):
            if start < stop:
                assert_array_equal(source.decode(source.read(start, stop)), expected.reshape(rows, cols)[start:stop])
                part_of_whole = source.decode(source.slice(whole, start, stop))
                assert_array_equal(part_of_whole, expected.reshape(rows, cols)[start:stop])
    with pytest.raises(SourceError, match=r"lm_head.weight: shape \[640, 128\], expected \[128, 640\]"):
        SourceTensor.open(checkpoint, "language_model.lm_head.weight", (128, 640))
    checkpoint.close()
