"""K3's chat (docs/MODELS.md 5.4): turns are elements, an assistant's has a channel for thinking and one for its answer.

    <|open|>message role="user"<|sep|>Hello.<|close|>message<|sep|><|end_of_msg|>

Tag names, attributes and contents are encoded one by one; only the four markers are special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from runtime.text.chat_format import Message, Segment, read_on
from runtime.text.chat_xtml_reader import XtmlReader
from runtime.text.tokenizer import Tokenizer

OPEN, CLOSE, SEP, END = (Segment(text, markup=True) for text in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))

Effort = Literal["low", "medium", "high", "max"]

_EFFORT_NOTE = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)


class XtmlFormat:
    """Turns of system, user and assistant. Without `thinking` an assistant's turn has no thinking channel at all."""

    MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

    def __init__(self, *, thinking: bool = True, effort: Effort | None = None) -> None:
        self._thinking = thinking
        self._effort = effort

    @property
    def name(self) -> str:
        """For messages to the user."""
        return "K3"

    def preamble(self) -> list[Segment]:
        """A note on how much to think, where that was asked for and there is thinking."""
        if self._effort is None or not self._thinking:
            return []
        return _element([Segment(_EFFORT_NOTE.format(self._effort))], role="system", type="thinking-effort")

    def turn(self, message: Message) -> list[Segment]:
        """A message element."""
        body = [Segment(content) for content in message.contents]
        if message.role == "assistant":
            thought = _channel("think", [Segment(message.reasoning)]) if self._thinking else []
            body = thought + _channel("response", body)
        name = {} if message.name is None else {"name": message.name}
        return _element(body, role=message.role, **name)

    def opening(self) -> list[Segment]:
        """An assistant's message and its first channel, both open."""
        return [*_open("message", role="assistant"), *_open(self._first_channel)]

    def reader(self, tokenizer: Tokenizer, turn: Sequence[int], stops: Sequence[str]) -> XtmlReader:
        """Tells the channels apart, the first one by `turn` itself."""
        return read_on(XtmlReader(tokenizer, stops), turn)

    @property
    def _first_channel(self) -> Literal["think", "response"]:
        return "think" if self._thinking else "response"


def _element(body: list[Segment], **attributes: str) -> list[Segment]:
    return [*_open("message", **attributes), *body, *_close("message"), END]


def _channel(tag: str, body: list[Segment]) -> list[Segment]:
    return [*_open(tag), *body, *_close(tag)]


def _open(tag: str, **attributes: str) -> list[Segment]:
    segments = [OPEN, Segment(tag)]
    for key, value in attributes.items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        segments += [Segment(f" {key}"), Segment('="'), Segment(escaped), Segment('"')]
    return [*segments, SEP]


def _close(tag: str) -> list[Segment]:
    return [CLOSE, Segment(tag), SEP]
