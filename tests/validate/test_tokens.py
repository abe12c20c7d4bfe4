"""Text to token ids and windows."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import FormatError, UsageError
from container.layout import TOKENIZER_NAME
from tests.checkpoints.tokenizer import N_RANKS, N_TOKENS, rank_file
from validate.tokens import Window, cut, read_ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / TOKENIZER_NAME).write_bytes(rank_file())
    return tmp_path


def ids_of(folder: Path, raw: bytes, max_tokens: int | None = None) -> list[int]:
    (folder / "text").write_bytes(raw)
    return read_ids(folder / "text", folder, N_TOKENS, max_tokens=max_tokens)


def test_windows_by_hand():
    assert cut([1, 2, 3, 4, 5, 6], 2) == [Window([1, 2], [2, 3]), Window([3, 4], [4, 5]), Window([5], [6])]
    assert cut([1, 2, 3], 2) == [Window([1, 2], [2, 3])]
    assert cut([1, 2], 256) == [Window([1], [2])]


@given(st.lists(st.integers(0, 99), min_size=2, max_size=60), st.integers(1, 70))
def test_every_token_but_the_first_is_a_target_once(ids, length):
    windows = cut(ids, length)
    assert [token for window in windows for token in window.targets] == ids[1:]
    assert [token for window in windows for token in window.ids] == ids[:-1]
    assert all(len(window.ids) == len(window.targets) == length for window in windows[:-1])
    assert 1 <= len(windows[-1].ids) <= length


def test_special_names_are_text(folder):
    """The file holds no special tokens, whatever it says, and its bytes are taken as they are."""
    raw = "[BOS]<|end_of_msg|> line\r\nline ümläut".encode()
    ids = ids_of(folder, raw)
    assert max(ids) < N_RANKS
    ranks = {int(line.split()[1]): line.split()[0] for line in rank_file().splitlines()}
    assert b"".join(base64.b64decode(ranks[token]) for token in ids) == raw


def test_no_more_than_asked_for(folder):
    every = ids_of(folder, b"one two three four five six seven")
    assert ids_of(folder, b"one two three four five six seven", 5) == every[:5]
    assert ids_of(folder, b"one two three four five six seven", 5000) == every


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "text is empty"),
        (b"a", r"has 1 token, at least 2 are needed"),
        (b"good \xff bad", r"is no UTF-8 text \(byte 5\)"),
        ("text".encode("utf-16"), r"is no UTF-8 text \(byte 0\)"),
    ],
)
def test_texts_that_cannot_be_used(folder, raw, message):
    with pytest.raises(UsageError, match=message):
        ids_of(folder, raw)


def test_files_that_cannot_be_read(folder):
    with pytest.raises(UsageError, match=r"--text: .*nowhere cannot be read \(No such file"):
        read_ids(folder / "nowhere", folder, N_TOKENS, max_tokens=None)
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory"):
        read_ids(folder, folder, N_TOKENS, max_tokens=None)


def test_a_container_without_a_usable_tokenizer(folder):
    (folder / TOKENIZER_NAME).write_bytes(b"no tokenizer\n")
    with pytest.raises(FormatError, match="line 1"):
        ids_of(folder, b"some text")
    (folder / TOKENIZER_NAME).unlink()
    with pytest.raises(UsageError, match=rf"--text needs a tokenizer, and {folder} has no {TOKENIZER_NAME}"):
        ids_of(folder, b"some text")
