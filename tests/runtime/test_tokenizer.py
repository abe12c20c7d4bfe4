"""Text and ids: the pre-tokeniser against another regex engine, special tokens, and malformed files."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path

import pytest
import regex
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from container.errors import FormatError, MoedockError
from runtime.text import tokenizer as module
from runtime.text.tokenizer import PRE_TOKENISER, Token, Tokenizer, detokenize, tokenize
from tests.checkpoints.tokenizer import N_RANKS, TEXT, rank_file, special_tokens
from tests.runtime import small_talk
from tests.runtime.conftest import tokenizer_files

BYTES = {bytes([byte]): byte for byte in range(256)}
# The two engines know different versions of Unicode, so only long-assigned characters are compared.
OLD = st.characters(codec="utf-8", max_codepoint=0xFFFF, exclude_categories=["Cn"])
TEXTS = st.text(st.one_of(st.sampled_from(" \n\r\t'sStTAaÀéǅʰ你好漢。!?1２٣-_·́"), OLD))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write(tmp_path, tokenizer_files("kimi_k3")), 640)


@given(TEXTS)
@example("It's 12345 Größe, HTTPServer'LL don't你好world  \n\n  x ")
def test_pieces_match_another_regex_engine(text: str) -> None:
    """A tokenizer that knows every expected piece as one token must give exactly these tokens."""
    expected = regex.findall(PRE_TOKENISER, text, flags=regex.V1)
    assert "".join(expected) == text
    ranks = dict(BYTES)
    for piece in expected:
        data = piece.encode()
        for end in range(2, len(data) + 1):
            ranks.setdefault(data[:end], len(ranks))
    whole = Tokenizer(ranks, {}, len(ranks))
    assert [whole.token_bytes(token_id).decode() for token_id in whole.encode(text)] == expected


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", " world"]),
        ("it's IT'S", ["it's", " IT'S"]),
        ("12345", ["123", "45"]),
        ("你好world世界", ["你好", "world", "世界"]),
        ("a  b", ["a", " ", " b"]),
        ("end.\n\n  next", ["end", ".\n\n", " ", " next"]),
        ("tail   ", ["tail", "   "]),
        ("x --\r\ny", ["x", " --\r\n", "y"]),
        ("camelCase", ["camel", "Case"]),
    ],
)
def test_pieces_by_hand(text: str, pieces: list[str]) -> None:
    assert regex.findall(PRE_TOKENISER, text, flags=regex.V1) == pieces


@given(text=TEXTS)
def test_decoding_gives_the_text_back(text: str) -> None:
    tokens = Tokenizer(BYTES, {}, 256)
    assert tokens.decode(tokens.encode(text)) == text


def test_merges_follow_the_ranks(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT) / 2
    lines = rank_file().splitlines()
    token, rank = lines[300].split()
    assert tokenizer.token_bytes(int(rank)) == base64.b64decode(token)


def test_text_cannot_form_a_special_token(tokenizer: Tokenizer) -> None:
    for token_id, text in special_tokens("kimi_k3").items():
        ids = tokenizer.encode(f"a{text}b")
        assert max(ids) < N_RANKS
        assert tokenizer.decode(ids) == f"a{text}b"
        assert tokenizer.decode([token_id]) == text


@cache
def tiktoken_with_specials() -> tiktoken.Encoding:
    ranks = {base64.b64decode(line.split()[0]): rank for rank, line in enumerate(rank_file().splitlines())}
    named = special_tokens("kimi_k3")
    specials = {named.get(token_id, f"<|reserved_token_{token_id}|>"): token_id for token_id in range(N_RANKS, 640)}
    return tiktoken.Encoding("other", pat_str=PRE_TOKENISER, mergeable_ranks=ranks, special_tokens=specials)


NAMES = st.sampled_from(
    [*special_tokens("kimi_k3").values(), "<|reserved_token_526|>", "<|im_end|>", "<|", "|>", "[", "]"]
)


@given(st.lists(st.one_of(NAMES, st.text(st.sampled_from("ae 1\n<|>[]é"), max_size=4)), max_size=8).map("".join))
@example("<|open|>message<|sep|>[EOS][EOS")
def test_markup_is_encoded_as_tiktoken_does_with_all_specials_allowed(text: str) -> None:
    tokenizer, other = small_talk.tokenizer("kimi_k3"), tiktoken_with_specials()
    ids = tokenizer.encode_markup(text)
    assert ids == other.encode(text, allowed_special="all")
    assert tokenizer.encode(text) == other.encode(text, allowed_special=set(), disallowed_special=())
    assert tokenizer.decode(ids) == text
    for token_id in ids:
        assert tokenizer.is_special(token_id) == (token_id >= N_RANKS)


def test_of_two_names_the_longer_is_meant_and_of_two_tokens_the_named_one() -> None:
    tokenizer = Tokenizer(BYTES, {256: "<a>", 257: "<a><b>", 258: "<|reserved_token_259|>", 700: "<far>"}, 260)
    assert tokenizer.encode_markup("<a><b><a><|reserved_token_259|>") == [257, 256, 258]
    assert tokenizer.special_id("<|reserved_token_259|>") == 258
    assert tokenizer.special_id("<far>") is None
    assert tokenizer.special_id("a") is None


def test_tokens_with_their_texts(tokenizer: Tokenizer) -> None:
    text = "The[EOT]é"
    end, the = N_RANKS + 9, tokenizer.encode("The")
    first, second = tokenizer.encode("é")
    assert tokenize(tokenizer, text, markup=True)[-3:] == [
        Token(end, "[EOT]", special=True),
        Token(first, "�", special=False),
        Token(second, "�", special=False),
    ]
    assert [token.id for token in tokenize(tokenizer, text)] == tokenizer.encode(text)
    assert "".join(token.text for token in tokenize(tokenizer, "The shelves")) == "The shelves"
    assert detokenize(tokenizer, [*the, end])[-1] == Token(end, "[EOT]", special=True)
    assert tokenize(Tokenizer(BYTES, {}, 256), "a[EOT]", markup=True)[-1] == Token(ord("]"), "]", special=False)
    with pytest.raises(MoedockError, match="token id 640"):
        detokenize(tokenizer, [640])


def test_unnamed_ids_are_reserved_tokens(tokenizer: Tokenizer) -> None:
    named = special_tokens("kimi_k3")
    unnamed = [token_id for token_id in range(N_RANKS, 640) if token_id not in named]
    assert unnamed
    assert tokenizer.decode(unnamed) == "".join(f"<|reserved_token_{token_id}|>" for token_id in unnamed)


def test_a_special_token_may_be_called_like_a_reserved_one() -> None:
    tokenizer = Tokenizer(BYTES, {256: "<|reserved_token_257|>"}, 258)
    assert tokenizer.decode([256]) == tokenizer.decode([257]) == "<|reserved_token_257|>"


def test_a_container_without_specials_has_reserved_tokens_only(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer.model": rank_file()})
    assert Tokenizer.load(tmp_path, 640).decode([N_RANKS]) == f"<|reserved_token_{N_RANKS}|>"


def test_half_a_character_decodes_to_a_replacement() -> None:
    tokens = Tokenizer(BYTES, {}, 256)
    assert tokens.decode("é".encode()[:1]) == "�"
    assert tokens.decode(list("é!".encode())) == "é!"


@pytest.mark.parametrize("bad", [-1, 640])
def test_decoding_an_id_outside_the_vocabulary(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(MoedockError, match=f"token id {bad} is outside the vocabulary: 0 to 639"):
        tokenizer.decode([1, bad])


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MoedockError, match=r"tokenizer\.model: no such file.*--ids"):
        Tokenizer.load(tmp_path, 640)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (b"!!! 0\n", r"line 1 is not base64 and a rank"),
        (b"QQ== x\n", r"line 1 is not base64"),
        (b"QQ==\n", r"line 1 is not base64"),
        (b"QQ== 640\n", r"rank 640 is not below"),
        (b"QQ== 1\nQQ== 2\n", r"line 2: token b'A' is empty, listed twice"),
        (b"QQ== 1\nQg== 1\n", r"two tokens have the same rank"),
        (b"QQ== 1\n", r"255 of the 256 single bytes"),
    ],
)
def test_malformed_rank_files(tmp_path: Path, ranks: bytes, message: str) -> None:
    write(tmp_path, {"tokenizer.model": ranks})
    with pytest.raises(FormatError, match=message):
        Tokenizer.load(tmp_path, 640)


@pytest.mark.parametrize(
    ("specials", "message"),
    [
        ("{", "must be a JSON list"),
        ("7", "must be a JSON list"),
        ('[{"id": 600}]', "must be a JSON list"),
        ('[{"id": "600", "text": "x"}]', "`id` must be a number"),
        ('[{"id": true, "text": "x"}]', "`id` must be a number"),
        ('[{"id": 600, "text": ["x"]}]', "`text` a string"),
        ('[{"id": 600, "text": "\\ud800"}]', "`text` a string"),
        ('[{"id": 600, "text": "x"}, {"id": 601, "text": "x"}]', "listed twice"),
        ('[{"id": 600, "text": "x"}, {"id": 600, "text": "y"}]', "listed twice"),
        ('[{"id": 3, "text": "x"}]', "an ordinary token's"),
        ('[{"id": 640, "text": "x"}]', "outside"),
    ],
)
def test_malformed_specials(tmp_path: Path, specials: str, message: str) -> None:
    write(tmp_path, {"tokenizer.model": rank_file(), "specials.json": specials.encode()})
    with pytest.raises(FormatError, match=message):
        Tokenizer.load(tmp_path, 640)


def test_specials_are_json_as_written(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer.model": rank_file(), "specials.json": json.dumps([{"id": 600, "text": "é"}]).encode()})
    assert Tokenizer.load(tmp_path, 640).decode([600]) == "é"


@given(st.lists(st.tuples(st.sampled_from(" a\n\u00e9"), st.integers(1, 40)), max_size=12))
def test_extreme_inputs_are_cut_where_a_run_is_too_long(runs: list[tuple[str, int]]) -> None:
    text = "".join(mark * n for mark, n in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_CHARACTERS", 60)
        patch.setattr(module, "_RUN_CHARACTERS", 7)
        pieces = list(module._pieces(text))
    assert pieces == [piece for start in range(0, len(text), 60) for piece in _cut(text[start : start + 60], 7)]


def _cut(text: str, longest: int) -> list[str]:
    """Character by character: a cut before the one that would make a run too long."""
    pieces, run = [""], 0
    for n, mark in enumerate(text):
        same = n > 0 and mark.isspace() == text[n - 1].isspace()
        run = run + 1 if same else 1
        if run > longest:
            pieces.append("")
            run = 1
        pieces[-1] += mark
    return pieces


def test_the_limits_are_those_of_the_release() -> None:
    assert [len(piece) for piece in module._pieces("a" * 60_000)] == [25_000, 25_000, 10_000]
    assert [len(piece) for piece in module._pieces("a " * 200_001)] == [400_000, 2]
