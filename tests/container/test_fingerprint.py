"""Fingerprints of shards: by hand, from a file and from any reader of ranges."""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.fingerprint import (
    SAMPLE_PIECE_BYTES,
    SAMPLE_PIECES,
    ShardFingerprint,
    file_fingerprint,
    fingerprint,
    sample_ranges,
)
from container.shards import read_shard_header


def shard_bytes(n_bytes: int, seed: int = 0) -> bytes:
    """A shard with one tensor of `n_bytes` random bytes."""
    header = {"t": {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + np.random.default_rng(seed).bytes(n_bytes)


def header_of(data: bytes) -> bytes:
    return data[: 8 + struct.unpack("<Q", data[:8])[0]]


def read_from(data: bytes):
    return lambda offset, n_bytes: data[offset : offset + n_bytes]


# bytes of weights → (offset among the weights, bytes) of the pieces, counted by hand
PIECES = {
    0: [(0, 0)] * 16,
    1: [(0, 1)] * 16,
    3: [(0, 3)] * 6 + [(1, 2)] * 5 + [(2, 1)] * 5,
    16: [(n, 16 - n) for n in range(16)],
    65536: [(4096 * n, 4096) for n in range(16)],
    65536 + 8: [(4096 * n + n // 2, 4096) for n in range(16)],
    160_000: [(10_000 * n, 4096) for n in range(16)],
}


@pytest.mark.parametrize("n_bytes", PIECES)
def test_by_hand(tmp_path, n_bytes):
    data = shard_bytes(n_bytes)
    header = header_of(data)
    weights = data[len(header) :]
    expected = ShardFingerprint(
        n_bytes=len(data),
        header_sha256=hashlib.sha256(header).hexdigest(),
        sample_sha256=hashlib.sha256(b"".join(weights[at : at + n] for at, n in PIECES[n_bytes])).hexdigest(),
    )
    assert fingerprint(header, len(data), read_from(data)) == expected
    (tmp_path / "shard").write_bytes(data)
    assert file_fingerprint(tmp_path / "shard", read_shard_header(tmp_path / "shard")) == expected


def test_golden():
    """Written down once: manifests and ledgers of earlier runs hold such digests."""
    header = struct.pack("<Q", 2) + b"{}"
    weights = bytes(n * n % 251 for n in range(100_000))
    found = fingerprint(header, len(header) + len(weights), read_from(header + weights))
    assert found.to_json() == {
        "bytes": 100_010,
        "header_sha256": "411a485216e432ece6b9af94fa32154cf79a2a56d4f81266baa50063f45092bd",
        "sample_sha256": "a62b16a589df95e4c5ff257f787aa5f80f83d5a38f10a57757f9c3034e14b8a4",
    }


@given(st.integers(0, 1 << 30), st.one_of(st.integers(0, 200_000), st.integers(0, 1 << 42)))
def test_pieces_are_spread_evenly_inside_the_weights(data_offset, n_bytes):
    ranges = sample_ranges(data_offset, data_offset + n_bytes)
    offsets = [offset for offset, _ in ranges]
    assert len(ranges) == SAMPLE_PIECES
    assert offsets[0] == data_offset
    for n, (offset, n_piece) in enumerate(ranges):
        assert data_offset <= offset <= offset + n_piece <= data_offset + n_bytes
        assert abs(offset - data_offset - n_bytes * n / SAMPLE_PIECES) <= 1 + n_bytes / (1 << 50)
        # a piece is cut short by nothing but the end
        assert n_piece == SAMPLE_PIECE_BYTES or offset + n_piece == data_offset + n_bytes
    steps = [after - before for before, after in pairwise(offsets)] + [data_offset + n_bytes - offsets[-1]]
    assert max(steps) - min(steps) <= 1
    if n_bytes <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:  # small: all of it is read
        assert {at for offset, n in ranges for at in (offset, offset + n)} >= ({data_offset, data_offset + n_bytes})
        assert all(after <= before + n for (before, n), after in zip(ranges, offsets[1:], strict=False))


@given(st.integers(1, 40_000), st.data())
def test_another_byte_of_a_small_shard_is_another_fingerprint(n_bytes, data):
    """Header or weights: up to 64 KiB everything is read."""
    good = shard_bytes(n_bytes)
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    size = len(header_of(good))
    one, other = (fingerprint(each[:size], len(each), read_from(each)) for each in (good, bytes(bad)))
    assert one != other
    assert (one.header_sha256 != other.header_sha256) != (one.sample_sha256 != other.sample_sha256)


def test_two_shards_of_one_shape_differ_in_their_samples_only():
    one, other = (shard_bytes(1 << 20, seed) for seed in (1, 2))
    found = [fingerprint(header_of(each), len(each), read_from(each)) for each in (one, other)]
    assert (found[0].n_bytes, found[0].header_sha256) == (found[1].n_bytes, found[1].header_sha256)
    assert found[0].sample_sha256 != found[1].sample_sha256


def test_few_bytes_are_read():
    """Of a shard on a server, each piece is a request."""
    asked: list[tuple[int, int]] = []

    def read(offset: int, n_bytes: int) -> bytes:
        asked.append((offset, n_bytes))
        return bytes(n_bytes)

    header, file_bytes = bytes(1000), 5 << 30
    fingerprint(header, file_bytes, read)
    assert asked == sample_ranges(1000, file_bytes)
    assert sum(n_bytes for _, n_bytes in asked) == 64 << 10


TEXTS = st.text(st.characters(codec="utf-8"))


@given(st.integers(0, 1 << 62), TEXTS, TEXTS, st.dictionaries(TEXTS, st.integers()))
def test_json_and_back(n_bytes, header, sample, more):
    """A ledger's line holds other keys beside."""
    found = ShardFingerprint(n_bytes, header, sample)
    raw = json.loads(json.dumps(found.to_json()))
    assert set(raw) == {"bytes", "header_sha256", "sample_sha256"}
    assert ShardFingerprint.from_json(more | raw) == found


GOOD = {"bytes": 12, "header_sha256": "ab", "sample_sha256": "cd"}
OTHERS: list[Any] = [None, True, 1.0, [], ["ab"], {}, {"a": 1}]


@pytest.mark.parametrize("key", GOOD)
def test_json_without_a_key_is_refused(key):
    with pytest.raises(KeyError, match=key):
        ShardFingerprint.from_json({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize("wrong", OTHERS, ids=repr)
@pytest.mark.parametrize("key", GOOD)
def test_json_of_other_types_is_refused(key, wrong):
    with pytest.raises(TypeError):
        ShardFingerprint.from_json(GOOD | {key: wrong})


@pytest.mark.parametrize("raw", [GOOD | {"bytes": "12"}, GOOD | {"header_sha256": 1, "sample_sha256": 2}, [], None, 3])
def test_what_is_no_fingerprint_is_refused(raw):
    with pytest.raises(TypeError):
        ShardFingerprint.from_json(raw)


def test_both_digests_of_another_type_are_refused():
    """Two lists can be added too."""
    with pytest.raises(TypeError):
        ShardFingerprint.from_json(GOOD | {"header_sha256": ["a"], "sample_sha256": ["b"]})
