"""Every switch of the runtime, one at a time and all at once, against the PyTorch reference and against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from container.reader import ContainerReader
from runtime.engine import Engine, Evaluation
from runtime.memory.plan import plan_memory
from runtime.options import RunOptions
from tests.runtime.oracle import relative_error
from validate.reference.model import forward
from validate.reference.sources import ContainerTensors

CHUNK = 16


@dataclass(frozen=True)
class Switches:
    """One setting of everything that must not change the result."""

    threads: int = 1
    lookahead: int = 0
    whole_cache: bool = True  # else the smallest that works
    verify: bool = False
    chunked: bool = True  # a prompt in chunks; else token by token

    def __str__(self) -> str:
        cache, prefill = "whole" if self.whole_cache else "smallest", "chunks" if self.chunked else "one by one"
        verify = "on" if self.verify else "off"
        return (
            f"threads {self.threads}, lookahead {self.lookahead}, cache {cache:8}, verify {verify:3}, prefill {prefill}"
        )

    def options(self, folder: Path, context: int) -> RunOptions:
        """As the engine takes them, for one container."""
        options = RunOptions(
            context=context,
            threads=self.threads,
            lookahead=self.lookahead,
            verify=self.verify,
            chunk=CHUNK if self.chunked else 1,
        )
        with ContainerReader.open(folder) as reader:
            plan = plan_memory(reader.manifest, reader.model, options, n_threads=self.threads)
        return replace(options, budget_bytes=plan.most_bytes if self.whole_cache else plan.floor_bytes)


BASE = Switches()
OPPOSITE = Switches(threads=2, lookahead=3, whole_cache=False, verify=True)
PLACEMENT = (  # these change no bit
    Switches(threads=2),
    Switches(lookahead=3),
    Switches(whole_cache=False),
    Switches(verify=True),
    Switches(lookahead=3, whole_cache=False),
    OPPOSITE,
)
SEQUENTIAL = Switches(chunked=False)  # this changes the order of sums
SEQUENTIAL_OPPOSITE = Switches(threads=2, lookahead=3, whole_cache=False, verify=True, chunked=False)


@dataclass(frozen=True)
class Compared:
    """One setting's result against the reference and the base run."""

    switches: Switches
    logits_error: float
    worst_layer_error: float
    same_routing: bool
    same_bits: bool


def evaluated(folder: Path, ids: Sequence[int], switches: Switches) -> Evaluation:
    """A prompt in the engine; half of it, then the rest from the state that was left."""
    with Engine.open(folder, switches.options(folder, len(ids))) as engine:
        state, half = engine.new_state(), len(ids) // 2
        parts = [engine.evaluate(part, state=state, trace=True) for part in (ids[:half], ids[half:])]
    return Evaluation(
        np.concatenate([part.logits for part in parts]),
        [np.concatenate(layers) for layers in zip(*(part.layers for part in parts), strict=True)],
        {layer: np.concatenate([part.routing[layer] for part in parts]) for layer in parts[0].routing},
    )


def compared(folder: Path, ids: Sequence[int]) -> Iterator[Compared]:
    """Every setting, the base first."""
    with ContainerReader.open(folder) as reader:
        reference = forward(ContainerTensors(reader), reader.model, ids, dtype=torch.float64)
    bases: dict[bool, Evaluation] = {}  # by chunked
    for switches in (BASE, *PLACEMENT, SEQUENTIAL, SEQUENTIAL_OPPOSITE):
        found = evaluated(folder, ids, switches)
        base = bases.setdefault(switches.chunked, found)
        yield Compared(
            switches,
            relative_error(found.logits, reference.logits.numpy()),
            max(relative_error(one, other.numpy()) for one, other in zip(found.layers, reference.layers, strict=True)),
            all(np.array_equal(found.routing[layer], chosen) for layer, chosen in reference.routing.items()),
            same_bits(found, base),
        )


def same_bits(one: Evaluation, other: Evaluation) -> bool:
    """Of all logits, of the residual stream after every layer, and the same experts."""
    arrays = [[each.logits, *each.layers, *each.routing.values()] for each in (one, other)]
    return all(a.tobytes() == b.tobytes() for a, b in zip(*arrays, strict=True))
