"""A real, small vocabulary: byte-pair training on words as the release cuts them, and the files it is kept in.

The release has 163,584 ranks and 256 special ids after them; here it is 960 and 64. Special tokens keep their
distance from the first special id, except the last two.
"""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import regex

from runtime.text.tokenizer import PRE_TOKENISER, Tokenizer

SPECIAL_OFFSETS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    -2: "[UNK]",
    -1: "[PAD]",
}
NOT_SPECIAL = {"<|open|>", "<|close|>", "<|sep|>"}

Pair = tuple[bytes, bytes]


class Vocabulary:
    """Byte-pair tokens in the order of their ranks, and special tokens behind them."""

    def __init__(self, tokens: Sequence[bytes], n_specials: int) -> None:
        self.tokens = list(tokens)
        self.size = len(tokens) + n_specials
        self.specials = {
            (self.size if offset < 0 else len(tokens)) + offset: text for offset, text in SPECIAL_OFFSETS.items()
        }
        ids = {text: token_id for token_id, text in self.specials.items()}
        self.bos_id, self.end_id, self.pad_id = ids["[BOS]"], ids["<|end_of_msg|>"], ids["[PAD]"]
        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        self.tokenizer = Tokenizer(ranks, self.specials, self.size)

    def encode(self, texts: Iterable[str]) -> list[int]:
        """Ids of all texts, the end token after each."""
        return [token_id for text in texts for token_id in (*self.tokenizer.encode(text), self.end_id)]

    def rank_file(self) -> bytes:
        """`tiktoken.model`: one line per token, base64 of its bytes and its rank."""
        return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self.tokens))

    def tokenizer_config(self) -> dict[str, Any]:
        """`tokenizer_config.json` with the special tokens under `added_tokens_decoder`."""
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        return {
            "added_tokens_decoder": {
                str(token_id): {"content": text, **flags, "special": text not in NOT_SPECIAL}
                for token_id, text in sorted(self.specials.items())
            },
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "model_max_length": 1048576,
            "tokenizer_class": "TikTokenTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        }


def learn_tokens(texts: Iterable[str], n_tokens: int) -> list[bytes]:
    """Byte-pair training: the 256 single bytes, then the most frequent neighbours joined until there are `n_tokens`.

    Pairs are counted inside the release's words (`PRE_TOKENISER`); of equally frequent ones the greatest is taken.
    Raises ValueError when the texts have too few pairs.
    """
    cutter = regex.compile(PRE_TOKENISER, flags=regex.V1)
    counts = Counter(word for text in texts for word in cutter.findall(text))
    words = [[bytes([byte]) for byte in word.encode()] for word in counts]
    return _join_most_frequent(words, list(counts.values()), n_tokens)


def _join_most_frequent(words: list[list[bytes]], counts: list[int], n_tokens: int) -> list[bytes]:
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))  # two different pairs may spell one token
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)  # words that have, or once had, a pair
    for number, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += counts[number]
            where[pair].add(number)
    while len(tokens) < n_tokens:
        best = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
        if best is None or pairs[best] <= 0:
            raise ValueError(f"the texts have only {len(tokens)} of {n_tokens} tokens in them")
        for number in where.pop(best):
            for pair in pairwise(words[number]):
                pairs[pair] -= counts[number]
            words[number] = _joined(words[number], best)
            for pair in pairwise(words[number]):
                pairs[pair] += counts[number]
                where[pair].add(number)
        del pairs[best]
        tokens[b"".join(best)] = None
    return list(tokens)


def _joined(word: list[bytes], pair: Pair) -> list[bytes]:
    joined: list[bytes] = []
    position = 0
    while position < len(word):
        width = 2 if tuple(word[position : position + 2]) == pair else 1
        joined.append(b"".join(word[position : position + width]))
        position += width
    return joined
