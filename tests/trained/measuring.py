"""What a checkpoint folder is worth: its loss on a text and its use of experts, by the reference alone."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from container.checkpoint import Checkpoint
from container.model import ModelConfig, canonical_config
from runtime.text.tokenizer import Tokenizer
from tests.trained.batches import run_batch
from validate.reference.sources import CheckpointTensors
from validate.reference.tensors import KeptTensors

WINDOW = 512  # tokens that are read from an empty state


@dataclass(frozen=True)
class Measured:
    """A text of `n_tokens` predicted tokens: mean loss in nats, and how often each expert of each layer was chosen."""

    n_tokens: int
    loss: float
    expert_counts: dict[int, list[int]]


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder."""
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    added = json.loads((folder / "tokenizer_config.json").read_bytes())["added_tokens_decoder"]
    specials = {int(token_id): token["content"] for token_id, token in added.items()}
    config = json.loads((folder / "config.json").read_bytes())
    return Tokenizer(ranks, specials, config["text_config"]["vocab_size"])


@torch.no_grad()
def measure(folder: Path, text: str) -> Measured:
    """Run `text` through the reference in windows, each of which begins with the last one's last target."""
    with closing(Checkpoint.open(folder)) as checkpoint:
        model = ModelConfig.from_config(canonical_config(checkpoint.config))
        tensors = KeptTensors(CheckpointTensors(checkpoint))
        ids = tokenizer_of(folder).encode(text)
        total = 0.0
        counts = {layer: torch.zeros(model.moe.n_experts, dtype=torch.int64) for layer in model.moe_layers}
        for inputs, targets in _batches(torch.tensor(ids)):
            output = run_batch(model, tensors, inputs)
            total += functional.cross_entropy(output.logits, targets.flatten(), reduction="sum").item()
            for layer, chosen in output.routing.items():
                counts[layer] += torch.bincount(chosen.flatten(), minlength=model.moe.n_experts)
    n_tokens = len(ids) - 1
    return Measured(n_tokens, total / n_tokens, {layer: count.tolist() for layer, count in counts.items()})


def _batches(ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of all whole windows [windows, WINDOW], then of the shorter rest."""
    n_whole = (len(ids) - 1) // WINDOW * WINDOW
    if n_whole:
        yield ids[:n_whole].reshape(-1, WINDOW), ids[1 : n_whole + 1].reshape(-1, WINDOW)
    if n_whole < len(ids) - 1:
        yield ids[None, n_whole:-1], ids[None, n_whole + 1 :]
