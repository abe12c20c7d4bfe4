"""What a model generates, read token by token: which text of it is shown, and where it ends by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from runtime.text.text_stream import TextStream
from runtime.text.tokenizer import Tokenizer

Channel = Literal["answer", "thinking", "tools"]
Ended = Literal["end", "stop"]  # the end marker of a turn, or a stop string


@dataclass(frozen=True)
class Piece:
    """Text that became certain, never empty."""

    channel: Channel
    text: str


class ReplyReader(Protocol):
    """Takes the tokens of one answer."""

    @property
    def ended(self) -> Ended | None:
        """Why the text is over although no end token came; None while it goes on."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""

    def feed(self, token_id: int) -> list[Piece]:
        """Take a token and return the text that is certain now."""

    def finish(self) -> list[Piece]:
        """No token comes any more: return what was held back."""


class TurnReader(ReplyReader, Protocol):
    """Takes the tokens of an assistant's turn in a chat."""

    def closing(self) -> list[int]:
        """Ids that close what is still open of the turn."""


class TextReader:
    """All tokens are text, special ones by their names; a turn may end with a marker.

    A marker with a special token in it is found by ids (its name spelt out in an answer ends nothing), one of plain
    text by its characters, since no token need end with it. It is not shown.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, close: str = "") -> None:
        """Raises UsageError for an empty stop string."""
        self._tokenizer = tokenizer
        self._close = close
        ids = tokenizer.encode_markup(close)
        self._close_ids = ids if any(map(tokenizer.is_special, ids)) else []
        self._close_text = close if close and not self._close_ids else None
        self._stream = TextStream(stops if self._close_text is None else [*stops, self._close_text])
        self._held: list[int] = []  # the last ids, as long as they may be the beginning of the marker

    @property
    def ended(self) -> Ended | None:
        """Why the text is over although no end token came; None while it goes on."""
        if self._close_ids and self._held == self._close_ids:
            return "end"
        if self._stream.stopped is None:
            return None
        return "end" if self._stream.stopped == self._close_text else "stop"

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stream.stopped if self.ended == "stop" else None

    def feed(self, token_id: int) -> list[Piece]:
        """Take a token and return the text that is certain now."""
        self._held.append(token_id)
        certain = b""
        while self._held and self._held != self._close_ids[: len(self._held)]:
            certain += self._tokenizer.token_bytes(self._held.pop(0))
        return answer(self._stream.feed(certain))

    def finish(self) -> list[Piece]:
        """No token comes any more: return what was held back, except the beginning of the marker."""
        return answer(self._stream.finish(unless=self._close_text))

    def closing(self) -> list[int]:
        """Ids of what is missing of the marker."""
        if self._close_text is None:
            return self._close_ids[len(self._held) :]
        return self._tokenizer.encode_markup(self._close[self._stream.begun(self._close) :])


def answer(text: str) -> list[Piece]:
    """`text` as pieces of the answer: none when it is empty."""
    return [Piece("answer", text)] if text else []


class Display:
    """Pieces as one text for a person: what is not the answer stands apart.

    Plainly under a line `[thinking]`, `[tools]` or, back again, `[answer]`; `dim`, for a terminal that knows ANSI
    colours, dimmed instead.
    """

    def __init__(self, *, dim: bool = False) -> None:
        self._dim = dim
        self._channel: Channel = "answer"
        self._begun = False

    def text(self, pieces: Iterable[Piece]) -> str:
        """What to show next."""
        return "".join(self._turned(piece.channel) + piece.text for piece in pieces)

    def finish(self) -> str:
        """What to show after the last piece: a terminal gets its colour back."""
        return "\x1b[0m" if self._dim and self._channel != "answer" else ""

    def _turned(self, channel: Channel) -> str:
        """What stands between a piece of the channel before and one of `channel`."""
        if channel == self._channel:
            self._begun = True
            return ""
        line_end = "\n\n" if self._begun else ""
        self._channel, self._begun = channel, True
        if not self._dim:
            return f"{line_end}[{channel}]\n"
        return f"\x1b[0m{line_end}" if channel == "answer" else f"{line_end}\x1b[2m"
