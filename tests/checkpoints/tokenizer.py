"""A small tokenizer in the release's layout: a tiktoken rank file learnt from a few sentences, and special tokens.

The release has 163,584 ranks and 256 special ids after them; here it is 512 and 128. Special tokens keep their
distance from the first special id, except the last two.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

N_RANKS = 512
N_TOKENS = 640  # ranks, then special ids
UNK_ID, PAD_ID = N_TOKENS - 2, N_TOKENS - 1
BOS_ID, END_OF_TURN_ID, MEDIA_PAD_ID = N_RANKS, N_RANKS + 2, N_RANKS + 21

_SHARED = {0: "[BOS]", 1: "[EOS]", 9: "[EOT]"}
_MEDIA = {18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>"}
_K3 = {
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    65: "<osagent_mode>",
}
_KIMI_LINEAR = {
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
}
_NOT_SPECIAL = {"<|open|>", "<|close|>", "<|sep|>"}

# one turn = <|im_ROLE|> label <|im_middle|> content <|im_end|>
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_' + message['role'] + '|>' + message.get('name', message['role']) -}}
{{- '<|im_middle|>' + message['content'] + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}
"""

TEXT = """\
A large model is a library in which most books stay closed. For every word it reads, the router walks along the
shelves, opens a handful of them, and leaves the rest where they stand. The library may be larger than the house;
what matters is how quickly the next book can be fetched, and whether the page that is read is the page that was
written. So we weigh every shelf before we move it, we copy the pages with care, and at the end we read both copies
aloud, side by side, until nobody can tell which of them is the original. When the lights go out in the middle of
the work, we begin again at the last shelf that was finished, not at the first one. The answer to the question is
found in the difference between the two: if it is smaller than the tolerance, the copy is good; if it is not, then
something was lost on the way, and the name of the shelf is printed so that somebody can look at it. In the morning
the reader asks for a story about the sea, the harbour and the old lighthouse, and the machine on the desk tells it.
"""


@cache
def rank_file() -> bytes:
    """`tiktoken.model`: one line per token, base64 of its bytes and its rank."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(_learn(TEXT, N_RANKS)))


def special_tokens(model_type: str) -> dict[int, str]:
    """Text of every named special id of `kimi_k3` or `kimi_linear`; the same ids mean different strings."""
    offsets = _SHARED | (_K3 | _MEDIA if model_type == "kimi_k3" else _KIMI_LINEAR)
    named = {N_RANKS + offset: text for offset, text in offsets.items()}
    return dict(sorted(named.items())) | {UNK_ID: "[UNK]", PAD_ID: "[PAD]"}


def tokenizer_config(model_type: str) -> dict[str, Any]:
    """`tokenizer_config.json` with the special tokens under `added_tokens_decoder`."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "added_tokens_decoder": {
            str(token_id): {"content": text, **flags, "special": text not in _NOT_SPECIAL}
            for token_id, text in special_tokens(model_type).items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]" if model_type == "kimi_k3" else "<|im_end|>",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 1048576,
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }


def _learn(text: str, n_tokens: int) -> list[bytes]:
    """Byte-pair training: the 256 single bytes, then the most frequent neighbours joined until there are n_tokens.

    Single bytes stand in GPT-2's order, printable ones first, so that an id is not its byte.
    """
    words = Counter(tuple(bytes([b]) for b in word.encode()) for word in re.findall(r" ?[a-zA-Z]+|[^a-zA-Z]", text))
    tokens = sorted(
        (bytes([b]) for b in range(256)), key=lambda b: (not b.decode("latin-1").isprintable() or b == b" ", b)
    )
    while len(tokens) < n_tokens:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(b"".join(best))
        words = Counter({_join(word, best): count for word, count in words.items()})
    return tokens


def _join(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    joined: list[bytes] = []
    for part in word:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return tuple(joined)
