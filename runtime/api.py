"""The Python API: a container opened for text. The commands use nothing else to generate."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from container.errors import MoedockError, SessionError, UsageError
from container.layout import TOKENIZER_NAME
from runtime import session
from runtime.disk.direct import Notice
from runtime.engine import Engine
from runtime.memory.planning import budget_bytes
from runtime.options import RunOptions
from runtime.state import SequenceState
from runtime.text.chat import Chat, load_chat
from runtime.text.chat_xtml import Effort
from runtime.text.end_tokens import end_ids
from runtime.text.generate import Conversation, Generation, Outcome, Step
from runtime.text.replies import Ended, Piece, ReplyReader, TextReader
from runtime.text.sampling import Sampler, Sampling
from runtime.text.tokenizer import Tokenizer

StopWhen = Callable[[str], bool]


def open_model(
    path: str | os.PathLike[str],
    *,
    budget: int | str | None = None,
    context: int = RunOptions.context,
    threads: int | None = RunOptions.threads,
    readers: int = RunOptions.readers,
    lookahead: int = RunOptions.lookahead,
    chunk: int = RunOptions.chunk,
    verify: bool = RunOptions.verify,
    learn: bool = RunOptions.learn,
    notice: Notice = lambda line: None,
    progress: Callable[[int, int], None] | None = None,
) -> OpenModel:
    """Open a container and read its trunk into memory.

    `budget` bounds all memory of the process, in bytes or as "24GiB"; by default it is what the machine can spare.
    `context` is how many tokens of prompts and answers there is room for. `verify` checks every checksum, `learn` keeps
    which experts were used for the next start. `threads` compute, `readers` read; `lookahead` experts of the next layer
    are read early; `chunk` tokens of a prompt are taken at once. `notice` is given lines that a person should see,
    `progress` how many bytes of the trunk are read, and of how many. Raises FormatError or IntegrityError for an
    unusable container, MoedockError for a budget that is too small.
    """
    options = RunOptions(
        budget_bytes=budget_bytes(budget),
        context=context,
        threads=threads,
        readers=readers,
        lookahead=lookahead,
        chunk=chunk,
        verify=verify,
        learn=learn,
    )
    engine = Engine.open(Path(path), options, notice=notice, progress=progress)
    try:
        return OpenModel(engine, notice)
    except BaseException:
        engine.close()
        raise


class Answer:
    """What the model says. Iterate once, over its text as it is made; `outcome` tells afterwards how it went."""

    def __init__(
        self,
        conversation: Conversation[SequenceState],
        reader: ReplyReader,
        *,
        end_ids: frozenset[int],
        limit: int | None,
        stop_when: StopWhen | None,
    ) -> None:
        self._text = ""
        stop = None if stop_when is None else lambda: stop_when(self._text)
        self._generation = Generation(conversation, reader, end_ids=end_ids, limit=limit, stop=stop)

    def __iter__(self) -> Iterator[str]:
        for step in self.steps():
            if step.text:
                yield step.text

    def steps(self) -> Iterator[Step]:
        """The same token by token: its id, and the text that it makes certain."""
        for step in self._generation:
            self._text += step.text
            yield step

    @property
    def outcome(self) -> Outcome:
        """Why it ended, how many tokens it took and how long."""
        return self._generation.outcome


class OpenModel:
    """An opened container and one conversation with it. Use as a context manager, or call `close`."""

    def __init__(self, engine: Engine, notice: Notice) -> None:
        self.engine = engine
        self.folder = engine.reader.folder
        # None: prompts and answers are token ids
        self.optional_tokenizer = _tokenizer_if_any(self.folder, engine.vocab_size, notice)
        self._end_ids = end_ids(engine.reader.manifest.config, engine.vocab_size, self.optional_tokenizer)
        self._identity = session.container_identity(self.folder)
        self.conversation = Conversation(engine)

    def __enter__(self) -> OpenModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and close the container's files."""
        self.engine.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The container's tokenizer. Raises MoedockError when it has none, FormatError for a malformed one."""
        return self.optional_tokenizer or Tokenizer.load(self.folder, self.engine.vocab_size)

    @property
    def ids(self) -> list[int]:
        """All tokens of the conversation, prompts and answers."""
        return list(self.conversation.ids)

    def chat(self, *, thinking: bool = True, effort: Effort | None = None) -> Chat | None:
        """The container's chat format, None when it has none. Raises FormatError when it is malformed."""
        tokenizer = self.optional_tokenizer
        if tokenizer is None:
            return None
        arch = self.engine.reader.manifest.arch
        return load_chat(self.folder, arch, tokenizer, thinking=thinking, effort=effort)

    def encoded(self, prompt: str | Sequence[int]) -> list[int]:
        """A prompt as token ids. Raises MoedockError for text when there is no tokenizer."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def generate(
        self,
        prompt: str | Sequence[int] = (),
        *,
        n: int | None = None,
        temperature: float = Sampling.temperature,
        top_p: float = Sampling.top_p,
        top_k: int = Sampling.top_k,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_when: StopWhen | None = None,
    ) -> Answer:
        """Go on from all that was said so far and from `prompt`, text or token ids, which becomes part of it.

        At most `n` tokens; the answer ends with the model's end token, before a `stop` string, or when `stop_when`,
        given its text so far after each piece of the prompt and each token, returns True. `temperature` 0 takes the
        likeliest token; above, it draws, from the `top_k` likeliest and the likeliest that make up `top_p`. `seed`
        begins the draws anew. Raises MoedockError for a prompt that is too long or no prompt at all.
        """
        with self._unchanged_on_error():
            self.conversation.extend(self.encoded(prompt))
            reader = self._plain_reader([stop] if isinstance(stop, str) else stop)
            sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
            return self._answer(reader, sampling, n, stop_when)

    def reply(
        self,
        message: str,
        *,
        system: str | None = None,
        thinking: bool = True,
        effort: Effort | None = None,
        n: int | None = None,
        temperature: float = Sampling.temperature,
        top_p: float = Sampling.top_p,
        top_k: int = Sampling.top_k,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_when: StopWhen | None = None,
    ) -> Answer:
        """The answer to a user's `message` in the model's chat format; the other arguments are as in `generate`.

        `system` is said before it; where the format has a thinking channel, `thinking` opens it and `effort` is said
        before the first turn. Raises MoedockError where the container has no chat format.
        """
        chat = self.chat(thinking=thinking, effort=effort)
        if chat is None:
            raise MoedockError(f"{self.folder}: has no chat format")
        with self._unchanged_on_error():
            chat.ask(self.conversation, message, system=system)
            reader = chat.reader(self.conversation, [stop] if isinstance(stop, str) else stop)
            sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
            return self._answer(reader, sampling, n, stop_when)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation to a session file, exactly as it stands. Raises SessionError."""
        conversation = self.conversation
        content = session.Session(conversation.ids, conversation.turn_start, conversation.sampler.state())
        session.save(Path(path), content, conversation.state, identity=self._identity)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on where a session file of this container ends, instead of what was said so far. Raises SessionError."""
        conversation = self.conversation
        try:
            content = session.load(
                Path(path), conversation.state, identity=self._identity, vocab_size=self.engine.vocab_size
            )
        except OSError as error:
            self.conversation = Conversation(self.engine)  # the old state is half overwritten
            raise SessionError(f"{path}: cannot be read ({error})") from None
        conversation.ids, conversation.turn_start = content.ids, content.turn_start
        conversation.sampler.restore(content.sampler)

    @contextlib.contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """An answer that cannot begin leaves the conversation as it was."""
        conversation = self.conversation
        n_ids, turn_start, sampler = len(conversation.ids), conversation.turn_start, conversation.sampler
        try:
            yield
        except BaseException:
            del conversation.ids[n_ids:]
            conversation.turn_start, conversation.sampler = turn_start, sampler
            raise

    def _plain_reader(self, stops: Sequence[str]) -> ReplyReader:
        if self.optional_tokenizer is not None:
            return TextReader(self.optional_tokenizer, stops)
        if stops:
            raise UsageError(f"{self.folder}: has no tokenizer, so answers have no text to stop at")
        return _IdReader()

    def _answer(self, reader: ReplyReader, sampling: Sampling, n: int | None, stop_when: StopWhen | None) -> Answer:
        sampler = Sampler(sampling)
        if sampling.seed is None:
            sampler.restore(self.conversation.sampler.state())
        self.conversation.sampler = sampler
        return Answer(self.conversation, reader, end_ids=self._end_ids, limit=n, stop_when=stop_when)


def _tokenizer_if_any(folder: Path, vocab_size: int, notice: Notice) -> Tokenizer | None:
    """The container's tokenizer; a malformed one is no obstacle to running on ids."""
    if not (folder / TOKENIZER_NAME).exists():
        return None
    try:
        return Tokenizer.load(folder, vocab_size)
    except MoedockError as error:
        notice(f"no tokenizer: {error}")
        return None


class _IdReader:
    """For a container without a tokenizer: an answer has ids and no text."""

    ended: Ended | None = None
    stop_string: str | None = None

    def feed(self, token_id: int) -> list[Piece]:
        return []

    def finish(self) -> list[Piece]:
        return []
