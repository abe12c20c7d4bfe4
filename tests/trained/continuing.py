"""Text continued by a container (through the runtime) and by a checkpoint (through the reference)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from container.checkpoint import Checkpoint
from container.model import ModelConfig, canonical_config
from runtime.engine import Engine
from runtime.text.tokenizer import Tokenizer
from tests.trained.measuring import tokenizer_of
from validate.reference.model import forward
from validate.reference.sources import CheckpointTensors
from validate.reference.tensors import KeptTensors

# ids so far to the logits [vocabulary] of the next
Predict = Callable[[list[int]], NDArray[np.float32]]


def by_container(folder: Path, prompt: str, n_tokens: int, *, temperature: float) -> str:
    """What the container adds to `prompt`: at most `n_tokens` tokens, up to the end token."""
    with Engine.open(folder) as engine:
        state = engine.new_state()
        n_read = 0

        def predict(ids: list[int]) -> NDArray[np.float32]:
            nonlocal n_read
            new, n_read = ids[n_read:], len(ids)
            last: NDArray[np.float32] = engine.evaluate(new, state=state, last_only=True).logits[-1]
            return last

        end_id = engine.reader.manifest.config["eos_token_id"]
        return continued(Tokenizer.load(folder, engine.vocab_size), prompt, n_tokens, predict, end_id, temperature)


def by_checkpoint(folder: Path, prompt: str, n_tokens: int, *, temperature: float) -> str:
    """The same by the reference, which reads everything anew for each token."""
    with closing(Checkpoint.open(folder)) as checkpoint:
        model = ModelConfig.from_config(canonical_config(checkpoint.config))
        tensors = KeptTensors(CheckpointTensors(checkpoint))

        def predict(ids: list[int]) -> NDArray[np.float32]:
            logits: NDArray[np.float32] = forward(tensors, model, ids).logits[-1].numpy()
            return logits

        end_id = checkpoint.config["eos_token_id"]
        return continued(tokenizer_of(folder), prompt, n_tokens, predict, end_id, temperature)


def continued(
    tokenizer: Tokenizer, prompt: str, n_tokens: int, predict: Predict, end_id: int, temperature: float
) -> str:
    """The text of at most `n_tokens` tokens, up to the end token.

    They are drawn from softmax(logits / temperature), by noise that is the same for every model that is asked.
    """
    random = np.random.default_rng(0)
    ids = tokenizer.encode(prompt)
    n_prompt = len(ids)
    while len(ids) < n_prompt + n_tokens:
        noise = random.gumbel(size=tokenizer.vocab_size)
        next_id = int(np.argmax(predict(ids) + temperature * noise))
        if next_id == end_id:
            break
        ids.append(next_id)
    return tokenizer.decode(ids[n_prompt:])
