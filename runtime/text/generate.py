"""The loop: prompt in, one token after another out, until there is a reason to end.

A conversation is all token ids so far and the model's state after the first `state.position` of them; the others are
pending: a prompt not yet read, or the last token of an answer. So an answer may end anywhere, and the next one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from container.errors import MoedockError, UsageError
from runtime.text.replies import Piece, ReplyReader
from runtime.text.sampling import Sampler


class State(Protocol):
    """What a model remembers of a sequence."""

    @property
    def position(self) -> int:
        """Tokens it has seen."""


S = TypeVar("S", bound=State)


class LanguageModel(Protocol[S]):
    """What generating needs of an engine."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits."""

    @property
    def context(self) -> int:
        """Positions a state has room for."""

    @property
    def chunk(self) -> int:
        """Tokens that are taken at once."""

    def new_state(self) -> S:
        """The state before the first token."""

    def feed(self, state: S, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Take at most `chunk` tokens, return the logits [vocabulary] of the next; after an error `state` is lost."""


class Conversation(Generic[S]):
    """Token ids, the model's state, and the sampler's: everything that decides how it goes on."""

    def __init__(self, model: LanguageModel[S]) -> None:
        self.model = model
        self.sampler = Sampler()
        self.ids: list[int] = []
        self.turn_start: int | None = None  # in a chat: where in `ids` the turn begins that is not closed yet
        self._state: S | None = None

    @property
    def state(self) -> S:
        """The model's state after `ids[: state.position]`."""
        if self._state is None:  # made only now, so that a lost one and its successor are never there together
            self._state = self.model.new_state()
        return self._state

    @property
    def pending(self) -> list[int]:
        """Ids that the model has not seen yet."""
        return self.ids[self.state.position :]

    def extend(self, ids: Sequence[int]) -> None:
        """Append a prompt. Raises MoedockError, with nothing changed, for an unknown id or when it does not fit."""
        for token_id in ids:
            if not 0 <= token_id < self.model.vocab_size:
                raise MoedockError(f"token id {token_id} is outside the vocabulary: 0 to {self.model.vocab_size - 1}")
        n_ids = len(self.ids) + len(ids)
        if n_ids > self.model.context:
            after = f" after {len(self.ids)} that are there already" if self.ids else ""
            raise MoedockError(
                f"the prompt has {len(ids)} tokens{after}, and the context has room for {self.model.context} in all; "
                f"give --ctx {n_ids} or more"
            )
        self.ids += ids

    def feed_piece(self) -> npt.NDArray[np.float32]:
        """Show the model the next pending ids, one chunk of them, and return the logits [vocabulary] after them.

        When that fails or is interrupted, the state is lost and all ids are pending again: nothing but time is lost.
        """
        start = self.state.position
        try:
            return self.model.feed(self.state, self.ids[start : start + self.model.chunk])
        except BaseException:
            self._state = None
            raise


Reason = Literal["end", "stop", "length", "context", "stopped", "interrupted", "abandoned", "error"]


@dataclass(frozen=True)
class Step:
    """One token and the text that it makes certain; without a token, the text that was held back until the end."""

    token_id: int | None
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join(piece.text for piece in self.pieces)


@dataclass
class Outcome:
    """How an answer went. Seconds are the model's and the sampler's, not those of whoever shows the text.

    reason: "end" (end token or end marker), "stop" (stop string), "length" (as many tokens as wanted), "context" (no
    room), "stopped" (by the callback); "interrupted" (Ctrl-C), "abandoned" (nobody asked for the rest), "error".
    """

    reason: Reason = "abandoned"
    n_prompt: int = 0  # tokens that were read before the first one was made
    prompt_seconds: float = 0.0
    n_generated: int = 0  # tokens of the answer, without the end token
    n_decoded: int = 0  # tokens that the model took one by one in `seconds`
    seconds: float = 0.0
    end_id: int | None = None  # the end token that came
    stop_string: str | None = None  # the one that was found

    @property
    def prompt_tokens_per_second(self) -> float:
        """Speed of reading the prompt; 0 when nothing was read."""
        return self.n_prompt / self.prompt_seconds if self.n_prompt else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding; 0 when nothing was decoded."""
        return self.n_decoded / self.seconds if self.n_decoded else 0.0


class Generation(Generic[S]):
    """One answer. Iterate over it once; `outcome` is complete afterwards, however the iteration ended.

    An end token ends the answer and becomes no part of it: the model is not shown it, and the conversation does not
    keep it. All other tokens are kept, those of a stop string too.
    """

    def __init__(
        self,
        conversation: Conversation[S],
        reader: ReplyReader,
        *,
        end_ids: frozenset[int] = frozenset(),
        limit: int | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """At most `limit` tokens; `stop` is asked after each piece of the prompt and each token.

        Raises UsageError for a limit below 1, and when there is nothing to go on from.
        """
        if limit is not None and limit < 1:
            raise UsageError(f"the number of tokens to generate must be at least 1, found {limit}")
        if not conversation.pending:
            raise UsageError("there is nothing to go on from: give a prompt")
        self.outcome = Outcome()
        self._conversation = conversation
        self._reader = reader
        self._end_ids = end_ids
        self._limit = limit
        self._stop = stop

    def __iter__(self) -> Iterator[Step]:
        try:
            yield from self._tokens()
        except KeyboardInterrupt:
            self.outcome.reason = "interrupted"
            raise
        except Exception:
            self.outcome.reason = "error"
            raise
        rest = self._reader.finish()
        if rest:
            yield Step(None, tuple(rest))

    def _tokens(self) -> Iterator[Step]:
        reason = self._no_room()
        while reason is None:
            token_id = self._next_token()
            if token_id is None:
                reason = "stopped"
            elif token_id in self._end_ids:
                self.outcome.end_id = token_id
                reason = "end"
            else:
                self._conversation.ids.append(token_id)
                self.outcome.n_generated += 1
                pieces = tuple(self._reader.feed(token_id))
                self.outcome.stop_string = self._reader.stop_string
                yield Step(token_id, pieces)
                reason = self._reader.ended or self._no_room() or self._asked_to_stop()
        self.outcome.reason = reason

    def _next_token(self) -> int | None:
        """Read what is pending and choose a token; None when the callback ends it before all is read."""
        outcome, conversation = self.outcome, self._conversation
        begun = perf_counter()
        decoding = outcome.n_generated > 0
        try:
            while True:
                before = conversation.state.position
                logits = conversation.feed_piece()
                n_read = conversation.state.position - before
                if decoding:
                    outcome.n_decoded += n_read
                else:
                    outcome.n_prompt += n_read
                if not conversation.pending:
                    return conversation.sampler.draw(logits)
                if self._asked_to_stop():
                    return None
        finally:
            if decoding:
                outcome.seconds += perf_counter() - begun
            else:
                outcome.prompt_seconds += perf_counter() - begun

    def _no_room(self) -> Reason | None:
        if self.outcome.n_generated == self._limit:
            return "length"
        return "context" if len(self._conversation.ids) >= self._conversation.model.context else None

    def _asked_to_stop(self) -> Reason | None:
        return "stopped" if self._stop is not None and self._stop() else None
