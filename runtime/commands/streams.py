"""What a command talks through. Only `__main__` knows the process's own streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Streams:
    """Results go to `out`, all else to `err`; `ask` prompts for the user's next line or raises EOFError."""

    stdin: TextIO
    out: TextIO
    err: TextIO
    ask: Callable[[str], str]

    def show(self, text: str) -> None:
        """Part of a result, at once."""
        self.out.write(text)
        self.out.flush()

    def show_object(self, value: dict[str, Any]) -> None:
        """A JSON object on a line of its own, at once."""
        self.show(f"{json.dumps(value)}\n")

    def say(self, line: str) -> None:
        """A line that is no result."""
        self.err.write(f"{line}\n")
        self.err.flush()

    def show_result(self, value: dict[str, Any], text: str, *, as_json: bool) -> int:
        """A whole result, as one JSON object or in words; the exit code."""
        if as_json:
            self.show_object(value)
        else:
            self.show(f"{text}\n")
        return 0
