"""What a chat is made of: messages, and the segments of text and markup that a format renders them as."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from runtime.text.replies import TextReader, TurnReader
from runtime.text.tokenizer import Tokenizer

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One turn. Several contents are encoded apart; `reasoning` is what an assistant thought before its content."""

    role: Role
    content: str | Sequence[str]
    reasoning: str = ""
    name: str | None = None

    @property
    def contents(self) -> list[str]:
        """The contents one by one."""
        return [self.content] if isinstance(self.content, str) else list(self.content)


@dataclass(frozen=True)
class Segment:
    """Text that is encoded by itself. Only markup can hold special tokens, so a message cannot forge structure."""

    text: str
    markup: bool = False


class ChatFormat(Protocol):
    """How a family of models is talked to. A turn's rendering depends on nothing before it."""

    @property
    def name(self) -> str:
        """For messages to the user."""

    def preamble(self) -> list[Segment]:
        """What stands before the first turn."""

    def turn(self, message: Message) -> list[Segment]:
        """A whole turn."""

    def opening(self) -> list[Segment]:
        """The beginning of an assistant's turn, up to where the model goes on."""

    def reader(self, tokenizer: Tokenizer, turn: Sequence[int], stops: Sequence[str]) -> TurnReader:
        """For the tokens that follow on `turn`: the ids of `opening` and those of the answer that are there already."""


def encode(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Ids of segments, each encoded by itself."""
    ids: list[int] = []
    for segment in segments:
        ids += tokenizer.encode_markup(segment.text) if segment.markup else tokenizer.encode(segment.text)
    return ids


R = TypeVar("R", bound=TurnReader)


def read_on(reader: R, ids: Sequence[int]) -> R:
    """`reader` after ids whose text has been shown before."""
    for token_id in ids:
        reader.feed(token_id)
    return reader


@dataclass(frozen=True)
class MarkerFormat:
    """`chat.json`: what stands before and after the turns of each role, and before an answer."""

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    open: str

    @property
    def name(self) -> str:
        """For messages to the user."""
        return "chat.json"

    def preamble(self) -> list[Segment]:
        """Nothing."""
        return []

    def turn(self, message: Message) -> list[Segment]:
        """Marker, contents, marker; there is no place for a name or for reasoning."""
        before, after = {"system": self.system, "user": self.user, "assistant": self.assistant}[message.role]
        return [Segment(before, markup=True), *map(Segment, message.contents), Segment(after, markup=True)]

    def opening(self) -> list[Segment]:
        """The marker before an answer."""
        return [Segment(self.open, markup=True)]

    def reader(self, tokenizer: Tokenizer, turn: Sequence[int], stops: Sequence[str]) -> TextReader:
        """All of an answer is text, up to the marker after an assistant's turn."""
        answer = turn[len(encode(tokenizer, self.opening())) :]
        return read_on(TextReader(tokenizer, stops, close=self.assistant[1]), answer)


class KimiFormat:
    """Kimi-Linear and K2 (docs/MODELS.md 5.5): `<|im_ROLE|>` label `<|im_middle|>` content `<|im_end|>`."""

    MARKERS = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")

    @property
    def name(self) -> str:
        """For messages to the user."""
        return "Kimi"

    def preamble(self) -> list[Segment]:
        """Nothing: no default system text."""
        return []

    def turn(self, message: Message) -> list[Segment]:
        """The label is the name of whoever speaks, or the role."""
        contents = map(Segment, message.contents)
        return [*self._head(message.role, message.name or message.role), *contents, Segment("<|im_end|>", markup=True)]

    def opening(self) -> list[Segment]:
        """The head of an assistant's turn."""
        return self._head("assistant", "assistant")

    def reader(self, tokenizer: Tokenizer, turn: Sequence[int], stops: Sequence[str]) -> TextReader:
        """All of an answer is text."""
        answer = turn[len(encode(tokenizer, self.opening())) :]
        return read_on(TextReader(tokenizer, stops, close="<|im_end|>"), answer)

    def _head(self, role: Role, label: str) -> list[Segment]:
        return [Segment(f"<|im_{role}|>", markup=True), Segment(label), Segment("<|im_middle|>", markup=True)]
