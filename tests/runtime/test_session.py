"""Session files: exact, whole, bound to their container, and safe to open whatever they hold."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import SessionError
from container.model import ModelConfig, canonical_config
from runtime import session
from runtime.session import HEADER, Session
from runtime.state import SequenceState
from runtime.text.sampling import Sampler, Sampling
from tests.containers import kimi_linear_config

MODEL = ModelConfig.from_config(canonical_config(kimi_linear_config(num_hidden_layers=2)))
IDENTITY = hashlib.sha256(b"a manifest").digest()
VOCAB_SIZE = 1000


def filled_state(position: int, capacity: int = 50, seed: int = 0) -> SequenceState:
    state = SequenceState.empty(MODEL, capacity)
    state.resume_at(position)
    rng = np.random.default_rng(seed)
    for _, array in state.arrays():
        array[:] = rng.standard_normal(array.shape)
    return state


def saved(tmp_path: Path, position: int = 5, n_ids: int = 7) -> tuple[Path, Session, SequenceState]:
    state = filled_state(position)
    sampler = Sampler(Sampling(temperature=1, seed=3))
    sampler.draw(np.zeros(9, dtype=np.float32))
    content = Session(list(range(n_ids)), 2, sampler.state())
    path = tmp_path / "some.session"
    session.save(path, content, state, identity=IDENTITY)
    return path, content, state


def load(path: Path, state: SequenceState | None = None, identity: bytes = IDENTITY) -> Session:
    return session.load(path, state or filled_state(0), identity=identity, vocab_size=VOCAB_SIZE)


def assert_same(one: SequenceState, other: SequenceState) -> None:
    assert one.position == other.position
    for (name, array), (other_name, other_array) in zip(one.arrays(), other.arrays(), strict=True):
        assert name == other_name
        np.testing.assert_array_equal(array, other_array)


@pytest.mark.parametrize("capacity", [5, 5000])
@pytest.mark.parametrize("before", [0, 4])
def test_what_is_saved_comes_back_into_any_context_that_has_room(tmp_path, capacity, before):
    path, content, state = saved(tmp_path)
    other = filled_state(before, capacity, seed=1)
    assert load(path, other) == content
    assert_same(other, state)
    assert [file.name for file in tmp_path.iterdir()] == ["some.session"]


def test_an_empty_session(tmp_path):
    path, content, state = saved(tmp_path, position=0, n_ids=3)
    other = filled_state(4, seed=1)
    assert load(path, other) == content
    assert_same(other, state)


def test_bytes_are_as_documented(tmp_path):
    path, content, state = saved(tmp_path)
    data = path.read_bytes()
    arrays = [array for _, array in state.arrays()]
    description_bytes = struct.unpack_from("<I", data, 12)[0]
    assert data[:8] == b"MOESESS\n"
    assert struct.unpack_from("<IIQQQ", data, 8) == (1, description_bytes, 7, 5, sum(each.nbytes for each in arrays))
    assert data[40:72] == IDENTITY
    description = json.loads(data[72 : 72 + description_bytes])
    assert description["turn_start"] == 2
    assert description["sampler"] == content.sampler
    assert description["arrays"] == [[name, "<f4", list(array.shape)] for name, array in state.arrays()]
    ids_end = 72 + description_bytes + 4 * 7
    assert data[72 + description_bytes : ids_end] == b"".join(n.to_bytes(4, "little") for n in range(7))
    assert data[ids_end:-32] == b"".join(array.tobytes() for array in arrays)
    assert data[-32:] == hashlib.sha256(data[:-32]).digest()


def test_the_documented_table_is_the_struct():
    text = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (u32|u64|bytes) \|", text, re.MULTILINE)
    letters = {"u32": "I", "u64": "Q"}
    assert "<" + "".join(letters.get(kind) or f"{size}s" for _, size, kind in rows) == HEADER.format
    ends = [int(offset) + int(size) for offset, size, _ in rows]
    assert [int(offset) for offset, _, _ in rows] == [0, *ends[:-1]]
    assert ends[-1] == HEADER.size


def refused(path: Path, message: str | None = None, **options: Any) -> None:
    """`path` is refused in one sentence that names it, and the state stays as it was."""
    state = filled_state(4, seed=1)
    with pytest.raises(SessionError, match=message) as caught:
        load(path, state, **options)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_same(state, filled_state(4, seed=1))


def test_a_session_of_another_container(tmp_path):
    path, _, _ = saved(tmp_path)
    refused(path, "another container", identity=hashlib.sha256(b"another").digest())


def test_a_session_longer_than_the_context(tmp_path):
    path, _, _ = saved(tmp_path)
    with pytest.raises(SessionError, match="has 5 positions, the context has room for 4; give --ctx 5 or more"):
        load(path, filled_state(0, capacity=4))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("session"))[0].read_bytes()


@given(st.data())
def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path, good, data):
    path = tmp_path / "bad.session"
    header_or_anywhere = st.one_of(st.integers(0, HEADER.size + 400), st.integers(0, len(good) - 1))
    position = data.draw(header_or_anywhere)
    if data.draw(st.booleans()):
        path.write_bytes(good[:position])
    else:
        flipped = good[position] ^ data.draw(st.integers(1, 255))
        path.write_bytes(good[:position] + bytes([flipped]) + good[position + 1 :])
    refused(path)


def test_huge_sizes_are_refused_before_anything_is_read(tmp_path):
    huge = 1 << 62
    for fields in [(1 << 31, 0, 0, 0), (0, huge, 0, 0), (0, 0, 0, huge), (0, huge, huge, 0)]:
        path = tmp_path / "huge"
        path.write_bytes(HEADER.pack(session.MAGIC, 1, *fields, IDENTITY) + bytes(100))
        refused(path, "bytes expected, found 172")


def test_what_is_no_session_file(tmp_path):
    for name, content in {"empty": b"", "text": b"just some text\n" * 100}.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "is no session file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "is no session file")
    refused(tmp_path, "is no session file")
    refused(tmp_path / "absent", "cannot be read")


def test_another_version_is_named(tmp_path):
    path, _, _ = saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:8] + struct.pack("<I", 2) + data[12:])
    refused(path, "version 2, this program reads version 1")


def reforged(tmp_path: Path, *, raw: bytes | None = None, ids: list[int] | None = None, **changes: Any) -> Path:
    """A file whose checksum is right and whose description or ids are not as a save writes them."""
    path, content, state = saved(tmp_path)
    data = path.read_bytes()
    start, size = HEADER.size, struct.unpack_from("<I", data, 12)[0]
    packed = json.dumps(json.loads(data[start : start + size]) | changes).encode() if raw is None else raw
    packed_ids = np.array(content.ids if ids is None else ids, dtype="<u4").tobytes()
    arrays = b"".join(array.tobytes() for _, array in state.arrays())
    header = HEADER.pack(session.MAGIC, 1, len(packed), len(packed_ids) // 4, 5, len(arrays), IDENTITY)
    body = header + packed + packed_ids + arrays
    path.write_bytes(body + hashlib.sha256(body).digest())
    return path


def test_a_forged_description_is_refused(tmp_path):
    generator = Sampler(Sampling(seed=1)).state()
    for changes, message in [
        ({"raw": b"[]"}, "malformed"),
        ({"raw": b"{}"}, "malformed"),
        ({"raw": b"[" * 5000}, "malformed"),
        ({"raw": b" " * (1 << 20) + b"{}"}, "contradicts itself"),
        ({"sampler": None}, "malformed"),
        ({"sampler": {}}, "malformed"),
        ({"sampler": generator | {"state": {"state": 1 << 200, "inc": 1}}}, "malformed"),
        ({"sampler": generator | {"bit_generator": "MT19937"}}, "malformed"),
        ({"turn_start": -1}, "malformed"),
        ({"turn_start": 8}, "malformed"),
        ({"turn_start": True}, "malformed"),
        ({"ids": [1, 2]}, "contradicts itself"),
        ({"ids": [1, 2, 3, 4, VOCAB_SIZE]}, "token id 1000, the vocabulary ends at 999"),
        ({"arrays": []}, "other parts"),
        ({"arrays": [["layers.0.delta", "<f4", [1, 1, 1]]]}, "other parts"),
    ]:
        refused(reforged(tmp_path, **changes), message)


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path, content, state = saved(tmp_path)
    good = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SessionError, match=r"cannot be written \(No space left on device\)"):
        session.save(path, content, state, identity=IDENTITY)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(SessionError, match="cannot be written"):
        session.save(tmp_path / "absent" / "x", content, state, identity=IDENTITY)
