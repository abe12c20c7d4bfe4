"""Reads what K3 writes into its turn: text by channel, tags left out, and what is missing to close the turn."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.text.replies import Channel, Ended, Piece
from runtime.text.text_stream import TextStream
from runtime.text.tokenizer import Tokenizer

_CHANNELS: dict[str, Channel] = {"think": "thinking", "response": "answer"}
_MAX_TAG_BYTES = 1024  # what is longer is no tag; nothing is shown while one is written


class XtmlReader:
    """A model may write anything, so nothing is an error here.

    Text is the answer's unless it stands in another channel; what is neither thinking nor answer (calls of tools) is
    shown as it is written, tags included. A stop string ends the answer and is not looked for elsewhere.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        """Begins before a message, whose opening tags are to be fed too. Raises UsageError for an empty stop string."""
        self._tokenizer = tokenizer
        self._markers = {tokenizer.special_id(text): text for text in ("<|open|>", "<|close|>", "<|sep|>")}
        self._stops = stops
        self._end_id = tokenizer.special_id("<|end_of_msg|>")
        self._over = False  # the message has ended
        self._stop_string: str | None = None
        self._elements: list[str] = []  # that are open
        self._had_answer = False
        self._marker = ""  # that began the tag which is being written
        self._tag = b""  # what is written of it so far
        self._channel: Channel = "answer"
        self._stream = self._new_stream()

    @property
    def ended(self) -> Ended | None:
        """Why the text is over although no end token came; None while it goes on."""
        if self._over:
            return "end"
        return None if self._stop_string is None else "stop"

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stop_string

    def feed(self, token_id: int) -> list[Piece]:
        """Take a token and return the text that is certain now."""
        if token_id == self._end_id:
            self._over = True
            return []
        marker = self._markers.get(token_id)
        if marker == "<|sep|>" and self._marker:
            return self._finish_tag()
        if marker is not None and marker != "<|sep|>":
            pieces = self._abandon_tag()
            self._marker = marker
            return pieces
        data = self._tokenizer.token_bytes(token_id)
        if not self._marker:
            return self._text(data)
        self._tag += data
        return self._abandon_tag() if len(self._tag) > _MAX_TAG_BYTES else []

    def finish(self) -> list[Piece]:
        """No token comes any more: return what was held back; of a tag that is not finished, nothing."""
        return self._pieces(self._stream.finish())

    def closing(self) -> list[int]:
        """Ids that finish a tag, close all elements (there is always an answer among them) and end the message."""
        if self._over:
            return []
        text, elements, had_answer = "", self._elements, self._had_answer
        if self._marker:
            written = self._tag.decode(errors="replace")
            expected = self._expected()
            text = (expected[len(written) :] if expected.startswith(written) else "") + "<|sep|>"
            elements = _after(elements, self._marker, _name(written + text))
            had_answer = had_answer or "response" in elements
        text += "".join(f"<|close|>{element}<|sep|>" for element in reversed(elements[1:]))
        if elements:
            text += "" if had_answer else "<|open|>response<|sep|><|close|>response<|sep|>"
            text += f"<|close|>{elements[0]}<|sep|>"
        return self._tokenizer.encode_markup(f"{text}<|end_of_msg|>")

    def _expected(self) -> str:
        """The name that the tag which is being written ought to have."""
        if self._marker == "<|close|>":
            return self._elements[-1] if self._elements else ""
        return "tools" if self._had_answer else "response"

    def _finish_tag(self) -> list[Piece]:
        tag, before = self._tag.decode(errors="replace"), self._channel
        written = f"{self._marker}{tag}<|sep|>".encode()
        self._elements = _after(self._elements, self._marker, _name(tag))
        self._had_answer = self._had_answer or "response" in self._elements
        closing, self._marker, self._tag = self._marker == "<|close|>", "", b""
        now = _channel_of(self._elements)
        shown = self._text(written) if closing and before == "tools" else []
        return shown + self._turn_to(now) + (self._text(written) if not closing and now == "tools" else [])

    def _abandon_tag(self) -> list[Piece]:
        """What looked like a tag was none, and is text."""
        written, self._marker, self._tag = self._marker.encode() + self._tag, "", b""
        return self._text(written)

    def _turn_to(self, channel: Channel) -> list[Piece]:
        if channel == self._channel:
            return []
        rest = self.finish()
        self._channel = channel
        self._stream = self._new_stream()
        return rest

    def _new_stream(self) -> TextStream:
        return TextStream(self._stops if self._channel == "answer" else ())

    def _text(self, data: bytes) -> list[Piece]:
        pieces = self._pieces(self._stream.feed(data))
        self._stop_string = self._stop_string or self._stream.stopped
        return pieces

    def _pieces(self, text: str) -> list[Piece]:
        return [Piece(self._channel, text)] if text else []


def _channel_of(elements: list[str]) -> Channel:
    """Where the text inside `elements` belongs."""
    if len(elements) < 2:
        return "answer"
    return _CHANNELS[elements[-1]] if all(element in _CHANNELS for element in elements[1:]) else "tools"


def _after(elements: list[str], marker: str, name: str) -> list[str]:
    """The open elements after a tag; one that closes nothing changes nothing."""
    if marker == "<|open|>":
        return [*elements, name]
    if name not in elements:
        return elements
    return elements[: len(elements) - 1 - elements[::-1].index(name)]


def _name(tag: str) -> str:
    """The tag's name: attributes follow after a space, the marker that ends a tag has no space before it."""
    return tag.removesuffix("<|sep|>").split(" ", 1)[0]
