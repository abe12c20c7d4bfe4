"""A container opened for running: token ids in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from container.errors import IntegrityError, MoedockError
from container.layout import CODEBOOKS_NAME
from container.machine import available_cores, memory_figures
from container.manifest import FileEntry
from container.reader import ContainerReader
from runtime.compute.gates import F32
from runtime.compute.team import Team
from runtime.disk.direct import DirectFiles, Notice
from runtime.disk.resident import Progress
from runtime.disk.store import ExpertStore
from runtime.memory.budget import choose_budget
from runtime.memory.plan import MemoryPlan, plan_memory
from runtime.models import Model, Recall, StepTrace, load_model, require_tensors
from runtime.options import RunOptions
from runtime.state import SequenceState
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

    def __init__(
        self,
        reader: ContainerReader,
        model: Model,
        store: ExpertStore,
        plan: MemoryPlan,
        *,
        budget_bytes: int,
        options: RunOptions,
        opened: ExitStack,
    ) -> None:
        """`opened` closes all that is open."""
        self.reader = reader
        self.store = store
        self.plan = plan
        self.budget_bytes = budget_bytes  # of all memory of the process
        self.chunk = options.chunk  # tokens that are taken at once
        self.context = options.context  # tokens that a new state has room for
        self._model = model
        self._opened = opened

    @classmethod
    def open(
        cls,
        folder: Path,
        options: RunOptions | None = None,
        *,
        notice: Notice = lambda line: None,
        progress: Progress | None = None,
    ) -> Engine:
        """Open a container within the budget and read its trunk.

        The option `verify` checks what the manifest and the records give checksums for: the codebooks and the tensors
        used now, each expert record when it is read. `notice` is given lines that a person should see, `progress` how
        much of the trunk is read. Raises FormatError when the container is not usable, IntegrityError when a checksum
        differs, MoedockError when the memory does not suffice.
        """
        options = options or RunOptions()
        with ExitStack() as opened:
            reader = opened.enter_context(ContainerReader.open(folder))
            n_threads = options.threads or available_cores()
            plan = plan_memory(reader.manifest, reader.model, options, n_threads=n_threads)
            budget = choose_budget(plan, memory_figures(), options.budget_bytes)
            if budget.warning is not None:
                notice(budget.warning)
            team = Team(n_threads)
            opened.callback(team.close)
            files = opened.enter_context(DirectFiles(folder, notice))
            if options.verify:
                _check_codebooks(reader)
            trunk = Trunk(reader, files, team=team, n_threads=options.readers, verify=options.verify)
            require_tensors(reader, trunk)  # a container that lacks some need not be read first
            trunk.load(progress)
            store = ExpertStore(
                reader,
                cache_bytes=plan.cache_bytes(budget.n_bytes),
                n_readers=options.readers,
                verify=options.verify,
                learn=options.learn,
                files=files,
                notice=notice,
            )
            opened.callback(store.close)
            model = load_model(reader, trunk, store, team, lookahead=options.lookahead)
            return cls(
                reader, model, store, plan, budget_bytes=budget.n_bytes, options=options, opened=opened.pop_all()
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and close the container's files."""
        self._opened.close()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits."""
        return self._model.vocab_size

    @property
    def recall(self) -> Recall:
        """How good the lookahead's guesses were."""
        return self._model.recall

    def new_state(self) -> SequenceState:
        """The state of a sequence before its first token."""
        return self._model.new_state(self.context)

    def step(self, state: SequenceState, token_id: int, *, trace: StepTrace | None = None) -> F32:
        """Take one token and return the logits [vocabulary] of the next; `state` moves on, `trace` is filled.

        Raises MoedockError for an id outside the vocabulary and where the context is used up, FormatError or
        IntegrityError for a bad record; after an error of these two `state` must not be used again.
        """
        self._check(state, [token_id])
        with np.errstate(all="ignore"):  # damaged weights may be NaN or infinite: then so are the logits
            logits: F32 = self._model.logits(self._model.advance(state, [token_id], trace))[0]
        return logits

    def feed(self, state: SequenceState, ids: Sequence[int]) -> F32:
        """Take T ≥ 1 tokens and return the logits [vocabulary] of the next. Raises what `step` raises."""
        logits: F32 = self.evaluate(ids, state=state, last_only=True).logits[-1]
        return logits

    def evaluate(
        self,
        ids: Sequence[int],
        *,
        state: SequenceState | None = None,
        trace: bool = False,
        last_only: bool = False,
        one_by_one: bool = False,
    ) -> Evaluation:
        """Take T tokens, from `state` on or from the beginning, a chunk at a time or, if so wished, one by one.

        `last_only` leaves out the logits of all positions but the last: [1, vocabulary]. Raises what `step` raises,
        for ids and room before anything is computed.
        """
        state = self.new_state() if state is None else state
        self._check(state, ids)
        logits = np.empty((min(1, len(ids)) if last_only else len(ids), self.vocab_size), dtype=np.float32)
        first, chunk = len(ids) - len(logits), 1 if one_by_one else self.chunk
        traces = []
        with np.errstate(all="ignore"):  # damaged weights may be NaN or infinite: then so are the logits
            for start in range(0, len(ids), chunk):
                part = ids[start : start + chunk]
                traces.append(StepTrace() if trace else None)
                hidden = self._model.advance(state, part, traces[-1])
                asked = hidden[max(0, first - start) :]
                if len(asked):
                    stop = start + len(part) - first
                    logits[stop - len(asked) : stop] = self._model.logits(asked)
        return _evaluation(logits, [each for each in traces if each is not None])

    def _check(self, state: SequenceState, ids: Sequence[int]) -> None:
        state.check_room(len(ids))
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
    layers = [np.concatenate(values) for values in zip(*(each.layers for each in traces), strict=True)]
    routing = {layer: np.concatenate([each.routing[layer] for each in traces]) for layer in traces[0].routing}
    return Evaluation(logits, layers, routing)
