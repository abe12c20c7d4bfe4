"""A chat with a model: which format a container's chat has, and the ids of turn after turn.

Only what is new is appended to a conversation: the end of the turn before, the user's turn, and the beginning of the
answer. Together these are exactly the whole conversation rendered at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from container.errors import FormatError, shown
from container.json_object import JsonObject
from container.layout import CHAT_NAME
from container.strict_json import parse_object
from runtime.text.chat_format import ROLES, ChatFormat, KimiFormat, MarkerFormat, Message, Segment, encode
from runtime.text.chat_xtml import Effort, XtmlFormat
from runtime.text.generate import Conversation
from runtime.text.replies import TurnReader
from runtime.text.tokenizer import Tokenizer

K3_ARCH = "kimi-k3"
_LOOKS_SPECIAL = re.compile(r"<\|.*?\|>")


class Chat:
    """Turns of one conversation at a time."""

    def __init__(self, chat_format: ChatFormat, tokenizer: Tokenizer) -> None:
        self._format = chat_format
        self._tokenizer = tokenizer

    @property
    def name(self) -> str:
        """The name of the format, for messages to the user."""
        return self._format.name

    @property
    def has_thinking(self) -> bool:
        """True where an answer can have a thinking channel, so that it means something to switch it off."""
        return isinstance(self._format, XtmlFormat)

    def ask(self, conversation: Conversation[Any], text: str, *, system: str | None = None) -> None:
        """Append a user's turn, and the beginning of the answer to it.

        An answer before it is closed, wherever it ended; `system` becomes a turn before the user's. Raises
        MoedockError, with nothing changed, when the context has no room.
        """
        messages = [] if system is None else [Message("system", system)]
        messages.append(Message("user", text))
        ids = [] if conversation.turn_start is None else self.reader(conversation).closing()
        if not conversation.ids:
            ids += encode(self._tokenizer, self._format.preamble())
        for message in messages:
            ids += encode(self._tokenizer, self._format.turn(message))
        turn_start = len(conversation.ids) + len(ids)
        conversation.extend(ids + encode(self._tokenizer, self._format.opening()))
        conversation.turn_start = turn_start

    def reader(self, conversation: Conversation[Any], stops: Sequence[str] = ()) -> TurnReader:
        """For the tokens of the answer that `ask` asked for. Raises UsageError for an empty stop string."""
        return self._format.reader(self._tokenizer, conversation.ids[conversation.turn_start :], stops)


def load_chat(
    folder: Path, arch: str, tokenizer: Tokenizer, *, thinking: bool = True, effort: Effort | None = None
) -> Chat | None:
    """The chat of a container whose manifest says `arch`; None when it has none, and can only continue text.

    A `chat.json` decides, unless it only repeats the markers of a format that is built in: that one knows more (K3's
    thinking channel). Without it, a built-in format is taken if the tokenizer has its markers. `thinking` and `effort`
    are K3's. Raises FormatError for a malformed chat.json.
    """
    built_in = _built_in(arch, tokenizer, thinking=thinking, effort=effort)
    path = folder / CHAT_NAME
    markers = _read_markers(path, tokenizer) if path.is_file() else None
    if markers is not None and (built_in is None or not _repeats(markers, arch)):
        return Chat(markers, tokenizer)
    return None if built_in is None else Chat(built_in, tokenizer)


def _built_in(arch: str, tokenizer: Tokenizer, *, thinking: bool, effort: Effort | None) -> ChatFormat | None:
    markers = XtmlFormat.MARKERS if arch == K3_ARCH else KimiFormat.MARKERS
    if any(tokenizer.special_id(marker) is None for marker in markers):
        return None
    return XtmlFormat(thinking=thinking, effort=effort) if arch == K3_ARCH else KimiFormat()


def _repeats(markers: MarkerFormat, arch: str) -> bool:
    """True when `markers` say no more than the built-in format of `arch` (of K3's, without its thinking channel)."""
    built_in: ChatFormat = XtmlFormat(thinking=False) if arch == K3_ARCH else KimiFormat()
    return [_text(part) for part in _parts(markers)] == [_text(part) for part in _parts(built_in)]


def _parts(chat_format: ChatFormat) -> list[list[Segment]]:
    return [*(chat_format.turn(Message(role, "\0")) for role in ROLES), chat_format.opening()]


def _text(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def _read_markers(path: Path, tokenizer: Tokenizer) -> MarkerFormat:
    try:
        keys = JsonObject(parse_object(path.read_bytes()), str(path))
    except ValueError as error:
        raise FormatError(f"{path}: not valid JSON ({error})") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({os.strerror(error.errno or 0)})") from None
    unknown = keys.raw.keys() - {*ROLES, "open"}
    if unknown:
        raise FormatError(f"{path}: knows only {', '.join(ROLES)} and open, found {shown(sorted(unknown))}")
    markers = MarkerFormat(
        system=_pair(keys, "system"),
        user=_pair(keys, "user"),
        assistant=_pair(keys, "assistant"),
        open=keys.text("open"),
    )
    for marker in (*markers.system, *markers.user, *markers.assistant, markers.open):
        for name in _LOOKS_SPECIAL.findall(marker):
            if tokenizer.special_id(name) is None:
                raise FormatError(f"{path}: {shown(name)} is no special token of this container's tokenizer")
    return markers


def _pair(keys: JsonObject, role: str) -> tuple[str, str]:
    value = keys.value(role)
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise FormatError(f"{keys.where}: `{role}` must be two strings, found {shown(value)}")
    return value[0], value[1]
