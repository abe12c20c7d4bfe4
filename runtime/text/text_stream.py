"""Bytes of tokens, as they come, into text that can be shown at once.

A character appears when its bytes are complete, and text that may be the beginning of a stop string appears when it
turns out not to be. The text is cut before the stop string that is complete first (of two that end together, the
longer), which does not depend on where the tokens are cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from container.errors import UsageError


class TextStream:
    """One stream of text. What `feed` and `finish` return, put together, is the whole text up to the stop string."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Raises UsageError for an empty stop string."""
        if "" in stops:
            raise UsageError("a stop string must not be empty")
        self.stopped: str | None = None  # the stop string that was found
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""  # at most the longest stop string, less one character

    def feed(self, data: bytes) -> str:
        """Take the next bytes and return the text that is certain now. Nothing comes after a stop string."""
        return self._take(self._decoder.decode(data))

    def finish(self, unless: str | None = None) -> str:
        """End the text and return what was held back, incomplete characters as U+FFFD.

        The beginning of `unless`, one of the stop strings, is left out at the end.
        """
        text = self._take(self._decoder.decode(b"", final=True)) + self._held
        if unless is not None and self.stopped is None:
            text = text[: len(text) - self.begun(unless)]
        self._held = ""
        return text

    def begun(self, stop: str) -> int:
        """How many characters at the end of the text so far are the beginning of `stop`, one of the stop strings."""
        return next(matcher.length for matcher in self._matchers if matcher.stop == stop)

    def _take(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        if not self._matchers:
            return text
        for position, character in enumerate(text):
            complete = [matcher.stop for matcher in self._matchers if matcher.step(character)]
            if complete:
                self.stopped = max(complete, key=len)
                known = self._held + text[: position + 1]
                self._held = ""
                return known[: len(known) - len(self.stopped)]
        known = self._held + text
        certain = len(known) - max(matcher.length for matcher in self._matchers)
        self._held = known[certain:]
        return known[:certain]


class _Matcher:
    """Finds one string character by character (Knuth, Morris and Pratt): a step takes constant time on average."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0  # characters at the end of the text that are the beginning of `stop`
        self._shorter = [0]  # for each length, the next shorter beginning that the text ends with too
        for character in stop[1:]:
            self._shorter.append(self._next(self._shorter[-1], character))

    def step(self, character: str) -> bool:
        """Take one character; True when `stop` is complete."""
        self.length = self._next(self.length, character)
        return self.length == len(self.stop)

    def _next(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._shorter[length - 1]
        return length + 1 if self.stop[length] == character else 0
