"""Which tokens end an answer.

Releases name them in several places that do not agree (K3's config says `<|end_of_msg|>`, its tokenizer `[EOS]`), and
a model may use any of them. So all of these end an answer: `eos_token_id` of the config, the same key of the outer
config of a multimodal release, and the special tokens named in `END_NAMES`. A release's generation_config.json repeats
its config and is not part of a container.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from container.errors import FormatError, shown
from container.json_object import is_count
from runtime.text.tokenizer import Tokenizer

END_NAMES = ("[EOS]", "[EOT]", "<|end_of_msg|>", "<|im_end|>")


def end_ids(config: Mapping[str, Any], vocab_size: int, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """Ids that end an answer, by a manifest's `config` and, where there is one, the tokenizer's special tokens.

    Raises FormatError when an `eos_token_id` is neither an id of the vocabulary nor a list of such.
    """
    found = set(_listed(config, "config", vocab_size))
    outer = config.get("_outer")
    if isinstance(outer, Mapping):
        found |= _listed(outer, "config._outer", vocab_size)
    if tokenizer is not None:
        found |= {token_id for name in END_NAMES if (token_id := tokenizer.special_id(name)) is not None}
    return frozenset(found)


def _listed(config: Mapping[str, Any], where: str, vocab_size: int) -> set[int]:
    value = config.get("eos_token_id")
    if value is None:
        return set()
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if not is_count(token_id, most=vocab_size - 1):
            raise FormatError(
                f"manifest.json: {where}: `eos_token_id` must be an id from 0 to {vocab_size - 1} or a list of such, "
                f"found {shown(value)}"
            )
    return set(ids)
