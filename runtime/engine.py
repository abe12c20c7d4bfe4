"""A container opened for running: token ids in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from container.errors import IntegrityError, MoedockError
from container.layout import CODEBOOKS_NAME
from container.machine import available_cores
from container.manifest import FileEntry
from container.reader import ContainerReader
from runtime.gates import F32
from runtime.models import Model, StepTrace, load_model
from runtime.options import RunOptions
from runtime.state import SequenceState
from runtime.store import ExpertStore
from runtime.team import Team
from runtime.trunk import Trunk


@dataclass(frozen=True)
class Evaluation:
    """What a model says to a sequence of T tokens."""

    logits: F32  # [T, vocabulary]: row t is about the token after t; [1, vocabulary] where only the last was asked for
    # with `trace`: the residual stream after each layer, n_layers arrays [T, hidden] (attention residuals: the
    # prefix sum), and per MoE layer the chosen experts' ids [T, k], ascending
    layers: list[F32] = field(default_factory=list)
    routing: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)


class Engine:
    """An opened model. Use as a context manager, or call `close`."""

    def __init__(self, reader: ContainerReader, model: Model, store: ExpertStore, team: Team) -> None:
        self.reader = reader
        self.store = store
        self._model = model
        self._team = team

    @classmethod
    def open(cls, folder: Path, options: RunOptions | None = None) -> Engine:
        """Open a container and read its trunk.

        The option `verify` checks what the manifest and the records give checksums for: the codebooks and the tensors
        used now, each expert record when it is read. Raises FormatError when the container is not usable,
        IntegrityError when a checksum differs.
        """
        options = options or RunOptions()
        reader = ContainerReader.open(folder)
        team = Team(options.threads or available_cores())
        try:
            if options.verify:
                _check_codebooks(reader)
            store = ExpertStore(reader, verify=options.verify)
            model = load_model(reader, Trunk(reader, verify=options.verify), store)
        except BaseException:
            team.close()
            reader.close()
            raise
        return cls(reader, model, store, team)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and close the container's files."""
        self._team.close()
        self.reader.close()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits."""
        return self._model.vocab_size

    def new_state(self) -> SequenceState:
        """The state of a sequence before its first token."""
        return self._model.new_state()

    def step(self, state: SequenceState, token_id: int, *, trace: StepTrace | None = None) -> F32:
        """Take one token and return the logits [vocabulary] of the next; `state` moves on, `trace` is filled.

        Raises MoedockError for an id outside the vocabulary, FormatError or IntegrityError for a bad record;
        after an error `state` must not be used again.
        """
        self._check_ids([token_id])
        with np.errstate(all="ignore"):  # damaged weights may be NaN or infinite: then so are the logits
            return self._model.logits(self._model.advance(state, token_id, trace))

    def evaluate(
        self, ids: Sequence[int], *, state: SequenceState | None = None, trace: bool = False, last_only: bool = False
    ) -> Evaluation:
        """Take T tokens, from `state` on or from the beginning. Raises what `step` raises, ids being checked first.

        `last_only` leaves out the logits of all positions but the last: [1, vocabulary].
        """
        self._check_ids(ids)
        state = self.new_state() if state is None else state
        logits = np.empty((min(1, len(ids)) if last_only else len(ids), self.vocab_size), dtype=np.float32)
        first = len(ids) - len(logits)
        traces = []
        with np.errstate(all="ignore"):  # damaged weights may be NaN or infinite: then so are the logits
            for position, token_id in enumerate(ids):
                traces.append(StepTrace() if trace else None)
                hidden = self._model.advance(state, token_id, traces[-1])
                if position >= first:
                    logits[position - first] = self._model.logits(hidden)
        return _evaluation(logits, [step for step in traces if step is not None])

    def _check_ids(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise MoedockError(
                    f"token id {token_id} is outside the vocabulary of {self.reader.folder}: 0 to {self.vocab_size - 1}"
                )


def _check_codebooks(reader: ContainerReader) -> None:
    recorded = reader.manifest.files.get(CODEBOOKS_NAME)
    if recorded is None:
        return  # a container of another writer: v0 has no checksum for codebooks
    path = reader.folder / CODEBOOKS_NAME
    found = FileEntry.of_file(path)
    if found != recorded:
        raise IntegrityError(
            f"{path}: sha256 is {found.sha256}, the manifest says {recorded.sha256}: damaged codebooks; fetch the "
            "file anew or convert the checkpoint again"
        )


def _evaluation(logits: F32, traces: list[StepTrace]) -> Evaluation:
    if not traces:
        return Evaluation(logits)
    layers = [np.stack(values) for values in zip(*(step.layers for step in traces), strict=True)]
    routing = {layer: np.stack([step.routing[layer] for step in traces]) for layer in traces[0].routing}
    return Evaluation(logits, layers, routing)
