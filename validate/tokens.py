"""The text that a container is measured on: read, turned into token ids, cut into windows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from container.errors import UsageError
from container.layout import TOKENIZER_NAME
from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Window:
    """Consecutive tokens that are read from an empty state, and after each the token that really follows."""

    ids: list[int]
    targets: list[int]


def read_ids(path: Path, folder: Path, vocab_size: int, *, max_tokens: int | None) -> list[int]:
    """Token ids of the text file `path` by the tokenizer of the container `folder`, at most `max_tokens` of them.

    Names of special tokens in the text are text like any other. Raises UsageError when the file cannot be read, is
    empty, no UTF-8, or shorter than two tokens, and when the container has no tokenizer; FormatError when that is
    malformed.
    """
    text = _read(path)
    if not (folder / TOKENIZER_NAME).is_file():
        raise UsageError(
            f"--text needs a tokenizer, and {folder} has no {TOKENIZER_NAME}: convert a checkpoint that has its "
            "tokenizer beside it"
        )
    ids = Tokenizer.load(folder, vocab_size).encode(text)[:max_tokens]
    if len(ids) < 2:
        raise UsageError(f"--text: {path} has {len(ids)} token, at least 2 are needed: one to read, one to predict")
    return ids


def cut(ids: Sequence[int], length: int) -> list[Window]:
    """Windows of `length` tokens (the last may be shorter) in which every token but the text's first is a target once.

    A window's last target is the next window's first token.
    """
    read, targets = ids[:-1], ids[1:]
    return [
        Window(list(read[start : start + length]), list(targets[start : start + length]))
        for start in range(0, len(read), length)
    ]


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--text: {path} cannot be read ({os.strerror(error.errno or 0)})") from None
    if not raw:
        raise UsageError(f"--text: {path} is empty")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--text: {path} is no UTF-8 text (byte {error.start}); convert it to UTF-8 first") from None
