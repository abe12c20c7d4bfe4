"""Text ⇄ token ids with the rank file and special tokens that a container carries (docs/MODELS.md 5.1 and 5.2)."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tiktoken

from container.errors import FormatError, MoedockError, shown
from container.layout import SPECIALS_NAME, TOKENIZER_NAME

_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# what is cut apart before any pair is merged; the first alternative that matches wins
PRE_TOKENISER = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# The release cuts extreme inputs, which bounds the work per piece and can change their ids.
_CHUNK_CHARACTERS = 400_000
_RUN_CHARACTERS = 25_000
_RUN = re.compile(r"\s+|\S+")


@dataclass(frozen=True)
class Token:
    """One token as a person may look at it; bytes that are no UTF-8 by themselves show as U+FFFD."""

    id: int
    text: str
    special: bool


class Tokenizer:
    """A byte-pair tokenizer; every id below `vocab_size` means something."""

    def __init__(self, ranks: dict[bytes, int], specials: Mapping[int, str], vocab_size: int) -> None:
        """`ranks` bytes → id; `specials` id → text for ids that have no rank, the others get a reserved name."""
        self.vocab_size = vocab_size
        unranked = set(range(vocab_size)) - set(ranks.values())
        self._special_text = {
            token_id: specials.get(token_id, f"<|reserved_token_{token_id}|>") for token_id in sorted(unranked)
        }
        # two may have one text: then it means the token that was given the name, not the one that is called so by rule
        by_rule_first = sorted(self._special_text.items(), key=lambda item: item[0] in specials)
        self._special_ids = {text: token_id for token_id, text in by_rule_first}
        # The engine never sees a special token, so that no text can become one.
        self._encoding = tiktoken.Encoding("container", pat_str=PRE_TOKENISER, mergeable_ranks=ranks, special_tokens={})

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Tokenizer:
        """The tokenizer of a container. Raises MoedockError when it has none, FormatError when it is malformed."""
        path = folder / TOKENIZER_NAME
        if not path.is_file():
            raise MoedockError(f"{path}: no such file; this container has no tokenizer, give token ids with --ids")
        ranks = _read_ranks(path, vocab_size)
        specials_path = folder / SPECIALS_NAME
        specials = _read_specials(specials_path, set(ranks.values()), vocab_size) if specials_path.is_file() else {}
        return cls(ranks, specials, vocab_size)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: the name of a special token in it is text like any other."""
        return [token_id for piece in _pieces(text) for token_id in self._encoding.encode_ordinary(piece)]

    def encode_markup(self, text: str) -> list[int]:
        """Ids of markup: names of special tokens become these tokens, what stands between them is encoded as text."""
        ids: list[int] = []
        for part in self._special_names.split(text):
            special = self._special_ids.get(part)
            ids += self.encode(part) if special is None else [special]
        return ids

    def special_id(self, text: str) -> int | None:
        """The id of the special token of that name, None where there is none."""
        return self._special_ids.get(text)

    def is_special(self, token_id: int) -> bool:
        """True for an id that no text can have."""
        return token_id in self._special_text

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, U+FFFD where the bytes are no UTF-8. Raises MoedockError for an id outside the vocabulary."""
        return b"".join(self.token_bytes(token_id) for token_id in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token. Raises MoedockError for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise MoedockError(f"token id {token_id} is outside the vocabulary: 0 to {self.vocab_size - 1}")
        special = self._special_text.get(token_id)
        return self._encoding.decode_single_token_bytes(token_id) if special is None else special.encode()

    @cached_property
    def _special_names(self) -> re.Pattern[str]:
        """Splits a text at the names of special tokens, which it keeps; where several fit, the longest is meant."""
        names = sorted(self._special_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"(?!)")


def tokenize(tokenizer: Tokenizer, text: str, *, markup: bool = False) -> list[Token]:
    """The tokens of `text`; with `markup`, names of special tokens in it become these tokens."""
    return detokenize(tokenizer, tokenizer.encode_markup(text) if markup else tokenizer.encode(text))


def detokenize(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """Ids with their texts, one by one. Raises MoedockError for an id outside the vocabulary."""
    return [Token(token_id, tokenizer.decode([token_id]), tokenizer.is_special(token_id)) for token_id in ids]


def _pieces(text: str) -> Iterator[str]:
    """`text` cut into chunks, and these wherever a run of only spaces or only other characters is too long."""
    for chunk_start in range(0, len(text), _CHUNK_CHARACTERS):
        chunk = text[chunk_start : chunk_start + _CHUNK_CHARACTERS]
        start = 0
        for run in _RUN.finditer(chunk):
            for cut in range(run.start() + _RUN_CHARACTERS, run.end(), _RUN_CHARACTERS):
                yield chunk[start:cut]
                start = cut
        yield chunk[start:]


def _read_ranks(path: Path, vocab_size: int) -> dict[bytes, int]:
    """Lines of base64 bytes and rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            encoded, rank = line.split()
            token, token_id = base64.b64decode(encoded, validate=True), int(rank)
        except ValueError:
            raise FormatError(f"{path}: line {number} is not base64 and a rank: {shown(line)}") from None
        if not token or not 0 <= token_id < vocab_size or token in ranks:
            raise FormatError(
                f"{path}: line {number}: token {shown(token)} is empty, listed twice, or its rank {token_id} is not "
                f"below the model's vocabulary of {vocab_size}"
            )
        ranks[token] = token_id
    if len(set(ranks.values())) != len(ranks):
        raise FormatError(f"{path}: two tokens have the same rank")
    single_bytes = {bytes([byte]) for byte in range(256)}
    if not single_bytes <= ranks.keys():
        raise FormatError(f"{path}: {len(single_bytes - ranks.keys())} of the 256 single bytes have no rank")
    return ranks


def _read_specials(path: Path, ranked: set[int], vocab_size: int) -> dict[int, str]:
    """`[{"id": int, "text": str}, …]`."""
    try:
        entries = [(entry["id"], entry["text"]) for entry in json.loads(_read(path))]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{path}: must be a JSON list of objects with `id` and `text` ({error})") from None
    for token_id, text in entries:
        if type(token_id) is not int or not _is_text(text):
            raise FormatError(f"{path}: `id` must be a number and `text` a string, found {shown((token_id, text))}")
        if token_id in ranked or not 0 <= token_id < vocab_size:
            raise FormatError(
                f"{path}: special token {shown(text)} has id {token_id}, which is an ordinary token's or outside "
                f"the model's vocabulary of {vocab_size}"
            )
    specials = dict(entries)
    if len(specials) != len(entries) or len(set(specials.values())) != len(entries):
        raise FormatError(f"{path}: an id or a text is listed twice")
    return specials


def _is_text(value: object) -> bool:
    """True for a string with something in it that UTF-8 can hold (JSON can spell lone surrogates)."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= mark <= "\udfff" for mark in value)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({os.strerror(error.errno or 0)})") from None
