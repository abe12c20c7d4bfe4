"""A model without weights, and the tokenizers of the small checkpoints: all that generating and chatting need."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from runtime.text.generate import Conversation, Generation, Step
from runtime.text.tokenizer import Tokenizer
from tests.checkpoints.tokenizer import N_TOKENS, rank_file, special_tokens

F32 = npt.NDArray[np.float32]


@cache
def tokenizer(model_type: str) -> Tokenizer:
    """The tokenizer of `kimi_k3` or `kimi_linear`."""
    ranks = {base64.b64decode(line.split()[0]): rank for rank, line in enumerate(rank_file().splitlines())}
    return Tokenizer(ranks, special_tokens(model_type), N_TOKENS)


@dataclass
class Seen:
    """The state of `Parrot`: what it was shown."""

    ids: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.ids)


class Parrot:
    """Says what a script says, token by token after a prompt, or else noise that all ids so far decide.

    Like a real model it is in the middle of things while it feeds: `disturb` is called then.
    """

    def __init__(
        self, script: Sequence[int] = (), *, vocab_size: int = N_TOKENS, context: int = 4096, chunk: int = 512
    ) -> None:
        self.vocab_size, self.context, self.chunk = vocab_size, context, chunk
        self.script = list(script)
        self.fed: list[list[int]] = []
        self.disturb: Callable[[], None] = lambda: None
        self.prompt_end = 0

    def new_state(self) -> Seen:
        return Seen()

    def feed(self, state: Seen, ids: Sequence[int]) -> F32:
        assert 1 <= len(ids) <= self.chunk
        assert state.position + len(ids) <= self.context
        state.ids += ids[: len(ids) // 2]
        self.disturb()
        state.ids += ids[len(ids) // 2 :]
        self.fed.append(list(ids))
        if self.script:
            logits = np.zeros(self.vocab_size, dtype=np.float32)
            logits[self.script[max(0, state.position - self.prompt_end)]] = 1
            return logits
        seed = zlib.crc32(np.array(state.ids).tobytes())
        return np.random.default_rng(seed).standard_normal(self.vocab_size).astype(np.float32)


def says(model: Parrot, conversation: Conversation[Seen], ids: Sequence[int]) -> None:
    """Let `model` say `ids` after what is pending."""
    model.script, model.prompt_end = [*ids, 0], len(conversation.ids)


def all_steps(generation: Generation[Seen]) -> tuple[list[int], str]:
    """Token ids and text of a whole answer."""
    steps: list[Step] = list(generation)
    return [step.token_id for step in steps if step.token_id is not None], "".join(step.text for step in steps)
