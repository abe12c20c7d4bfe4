from __future__ import annotations

import json
import math
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from container.errors import ShardError
from container.shards import LENGTH, ShardHeader, header_size, parse_shard_header, read_shard_header
from tests import strategies

TORCH_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.uint8: "U8",
    torch.int8: "I8", torch.bool: "BOOL", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@st.composite
def library_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of any dtype and any bytes; scalars and empty ones included."""
    tensors = {}
    for name in draw(st.lists(strategies.tensor_names, unique=True, max_size=6)):
        dtype, shape = draw(st.sampled_from(list(TORCH_DTYPES))), draw(st.lists(st.integers(0, 4), max_size=3))
        n_bytes = math.prod(shape) * dtype.itemsize
        data = draw(st.binary(min_size=n_bytes, max_size=n_bytes))
        raw = torch.tensor(list(data), dtype=torch.uint8)
        tensors[name] = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)
    return tensors


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


@given(library_tensors(), st.none() | st.just({"format": "pt"}))
def test_headers_say_what_the_library_reads(tmp_path, tensors, metadata):
    data = save(tensors, metadata)
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    header = read_shard_header(path)
    assert header.file_bytes == len(data)
    library = load(data)
    assert set(header.tensors) == set(library) == set(tensors)
    for name, tensor in header.tensors.items():
        assert tensor.name == name
        assert tensor.dtype == TORCH_DTYPES[library[name].dtype]
        assert tensor.shape == library[name].shape
        assert data[tensor.offset : tensor.offset + tensor.n_bytes] == raw_bytes(library[name])
    offsets = [tensor.offset for tensor in header.tensors.values()]
    assert offsets == sorted(offsets)


def entry(start: int, end: int, shape: Any = (), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) or [end - start], "data_offsets": [start, end]}


def shard(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A shard of any header: an object, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def read(folder: Path, data: bytes) -> ShardHeader:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(data)
    return read_shard_header(path)


GOOD = {"a": entry(0, 8, [2], "F32"), "b": entry(8, 12)}
NESTED = b"[" * 500 + b"]" * 500  # what the parser takes
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "too few"),
    "seven bytes": (b"\1" * 7, "too few"),
    "header longer than the file": (shard(GOOD, bytes(12), length=4000), "truncated, download it again"),
    "header length 2^63": (shard(GOOD, bytes(12), length=1 << 63), "at most 100000000"),
    "header length 2^64 - 1": (shard(GOOD, bytes(12), length=(1 << 64) - 1), "at most 100000000"),
    "header length just allowed, in a small file": (shard(GOOD, length=100_000_000), "truncated"),
    "header length too short": (shard(GOOD, bytes(12), length=10), "not valid JSON"),
    "header length 0": (shard(b"", bytes(12)), "not valid JSON"),
    "not JSON": (shard(b"pickle"), "not valid JSON"),
    "not UTF-8": (shard(b'{"\xff":1}'), "not valid JSON"),
    "surrogate in a name": (shard(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "not valid JSON"),
    "a list": (shard([]), "must hold an object"),
    "white space first": (shard(b"  " + json.dumps(GOOD).encode(), bytes(12)), "first byte"),
    "tensor twice": (shard(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 1)).encode(),) * 2), b"1"), "key occurs twice"),
    "dtype twice": (shard(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"1"), "occurs twice"),
    "deep nesting": (shard(DEEP), "nested too deeply"),
    "nesting in a shape": (shard(b'{"a":{"dtype":"U8","shape":%s,"data_offsets":[0,1]}}' % NESTED, b"1"), "shape must"),
    "NaN": (shard(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"1"), "NaN"),
    "number of 5000 digits": (shard(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "metadata no object": (shard({"__metadata__": [], **GOOD}, bytes(12)), "__metadata__"),
    "metadata with a number": (shard({"__metadata__": {"x": 1}, **GOOD}, bytes(12)), "__metadata__"),
    "tensor is a number": (shard({"a": 1}), "tensor a: must have exactly"),
    "key missing": (shard({"a": {"dtype": "U8", "shape": [1]}}, b"1"), "tensor a: must have exactly"),
    "key too many": (shard({"a": {**entry(0, 1), "x": 0}}, b"1"), "tensor a: must have exactly"),
    "unknown dtype": (shard({"a": entry(0, 1, dtype="F7")}, b"1"), "unknown dtype 'F7'"),
    "dtype no string": (shard({"a": entry(0, 1, dtype=["U8"])}, b"1"), r"unknown dtype \['U8'\]"),
    "shape too large for the range": (shard({"a": entry(0, 8, [3], "F32")}, bytes(8)), "takes 96 bits, .* give 64"),
    "shape too small for the range": (shard({"a": entry(0, 8, [1], "F32")}, bytes(8)), "takes 32 bits"),
    "half a byte": (shard({"a": entry(0, 2, [3], "F4")}, bytes(2)), "takes 12 bits"),
    "huge shape": (shard({"a": entry(0, 1, [1 << 62] * 20)}, b"1"), "tensor a: U8 of shape"),
    "huge shape times zero": (shard({"a": entry(0, 1, [1 << 62, 0])}, b"1"), "takes 0 bits"),
    "65 dimensions": (shard({"a": entry(0, 1, [1] * 65)}, b"1"), "at most 64"),
    "negative size": (shard({"a": entry(0, 1, [-1])}, b"1"), "shape"),
    "two negative sizes": (shard({"a": entry(0, 1, [-1, -1])}, b"1"), "shape"),
    "size is a bool": (shard({"a": entry(0, 1, [True])}, b"1"), "shape"),
    "size is a float": (shard({"a": entry(0, 1, [1.0])}, b"1"), "shape"),
    "size 2^63": (shard({"a": entry(0, 1, [1 << 63])}, b"1"), "shape"),
    "offset is a float": (shard({"a": {**entry(0, 1), "data_offsets": [0.0, 1.0]}}, b"1"), "data_offsets"),
    "offset is a bool": (shard({"a": {**entry(0, 1), "data_offsets": [False, True]}}, b"1"), "data_offsets"),
    "negative offset": (shard({"a": {**entry(0, 1), "data_offsets": [-1, 0]}}, b"1"), "data_offsets"),
    "three offsets": (shard({"a": {**entry(0, 1), "data_offsets": [0, 1, 1]}}, b"1"), "data_offsets"),
    "falling offsets": (shard({"a": {**entry(0, 1), "data_offsets": [1, 0]}}, b"1"), "data_offsets"),
    "overlap": (shard({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "tensor b overlaps"),
    "same bytes twice": (shard({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8)), "tensor b overlaps"),
    "empty tensor inside another": (shard({"a": entry(0, 8), "b": entry(4, 4, [0])}, bytes(8)), "tensor b overlaps"),
    "hole": (shard({"a": entry(0, 8), "b": entry(9, 12)}, bytes(12)), "tensor b leaves a hole"),
    "hole at the start": (shard({"a": entry(1, 8)}, bytes(8)), "tensor a leaves a hole"),
    "trailing bytes": (shard(GOOD, bytes(13)), "1 bytes follow the last tensor"),
    "trailing bytes and no tensor": (shard({}, bytes(13)), "13 bytes follow"),
    "data missing": (shard(GOOD, bytes(11)), "truncated, download it again"),
    "data of 2^62 bytes announced": (shard({"a": entry(0, 1 << 62)}, b"1"), "truncated, download it again"),
}  # fmt: skip


def test_the_good_shard_is_good(tmp_path):
    tensors = read(tmp_path, shard(GOOD, bytes(12))).tensors
    assert [(t.name, t.dtype, t.shape, t.n_bytes) for t in tensors.values()] == [
        ("a", "F32", (2,), 8),
        ("b", "U8", (4,), 4),
    ]
    assert read(tmp_path, shard({})).tensors == {}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_shards_are_refused_by_name_and_in_little_memory(tmp_path, name):
    data, message = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(ShardError, match=message) as caught:
            read(tmp_path, data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(str(tmp_path / "model-00001-of-00002.safetensors"))
    assert len(str(caught.value)) < 1000
    assert peak_bytes < 8 * len(data) + 200_000


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ShardError, match="No such file"):
        read_shard_header(tmp_path / "absent.safetensors")
    with pytest.raises(ShardError, match="not a regular file"):
        read_shard_header(tmp_path)
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for ever
    with pytest.raises(ShardError, match="not a regular file"):
        read_shard_header(tmp_path / "fifo")


SMALL = save(
    {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(5, dtype=torch.uint8), "c": torch.tensor(1.0)},
    {"format": "pt"},
)


@given(st.data())
def test_damage_is_refused_or_harmless(tmp_path, data):
    """Any other exception than ShardError fails; what is accepted has ranges inside the file."""
    bad = data.draw(strategies.damaged(SMALL))
    try:
        header = read(tmp_path, bad)
    except ShardError:
        return
    for tensor in header.tensors.values():
        assert tensor.offset + tensor.n_bytes <= len(bad) == header.file_bytes


@given(st.data())
def test_hostile_values_are_refused_or_harmless(tmp_path, data):
    changed = data.draw(strategies.with_hostile_value(json.loads(SMALL[8 : 8 + struct.unpack("<Q", SMALL[:8])[0]])))
    bad = shard(changed, SMALL[-21:])
    try:
        header = read(tmp_path, bad)
    except ShardError:
        return
    assert sum(tensor.n_bytes for tensor in header.tensors.values()) == 21


def parsed(path: Path, data: bytes, file_bytes: int | None = None) -> ShardHeader:
    """The header of a shard that is elsewhere: first its length, then as many bytes as that says."""
    file_bytes = len(data) if file_bytes is None else file_bytes
    return parse_shard_header(data[: header_size(data[: LENGTH.size], file_bytes, path)], file_bytes, path)


def outcome(found: Callable[[], ShardHeader]) -> ShardHeader | str:
    try:
        return found()
    except ShardError as error:
        return str(error)


def assert_read_alike(folder: Path, data: bytes) -> None:
    """From a file and from bytes: the same header, or the same words of refusal."""
    path = folder / "model-00001-of-00002.safetensors"
    assert outcome(lambda: read(folder, data)) == outcome(lambda: parsed(path, data))


@given(library_tensors())
def test_a_header_can_be_read_without_its_shard(tmp_path, tensors):
    data = save(tensors)
    header = read(tmp_path, data)
    assert parsed(header.path, data) == header
    assert parsed(header.path, data[: header.data_offset], len(data)) == header
    assert header_size(data[:8], len(data), header.path) == header.data_offset == 8 + int.from_bytes(data[:8], "little")


def test_every_truncation_is_refused_alike(tmp_path):
    for n in range(len(SMALL)):
        assert_read_alike(tmp_path, SMALL[:n])
        with pytest.raises(ShardError, match="too few" if n < 8 else "truncated, download it again"):
            read(tmp_path, SMALL[:n])


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_shards_are_refused_alike(tmp_path, name):
    assert_read_alike(tmp_path, HOSTILE[name][0])


@given(st.data())
def test_damage_is_seen_alike(tmp_path, data):
    assert_read_alike(tmp_path, data.draw(strategies.damaged(SMALL)))


def test_a_header_with_too_few_or_too_many_bytes_is_refused(tmp_path):
    path = tmp_path / "shard"
    size = header_size(SMALL[:8], len(SMALL), path)
    assert parse_shard_header(SMALL[:size], len(SMALL), path).data_offset == size
    for n in (8, 9, size - 1, size + 1, len(SMALL)):
        with pytest.raises(ShardError, match=f"^{path}: the file ended inside its header$"):
            parse_shard_header(SMALL[:n], len(SMALL), path)
    for n in range(8):
        with pytest.raises(ShardError, match=f"^{path}: {len(SMALL)} bytes are too few for a safetensors file$"):
            header_size(SMALL[:n], len(SMALL), path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    """Its size was taken before."""
    path = tmp_path / "shard"
    path.write_bytes(SMALL)
    status = path.stat()
    path.write_bytes(SMALL[:20])
    monkeypatch.setattr(Path, "stat", lambda _: status)
    with pytest.raises(ShardError, match="the file ended inside its header"):
        read_shard_header(path)
