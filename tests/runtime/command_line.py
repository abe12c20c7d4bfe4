"""Commands run in this process, their output read back."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.__main__ import main
from runtime.engine import Engine

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *argv: object) -> Any:
    assert main([str(arg) for arg in argv]) == 0
    out = capsys.readouterr().out
    return json.loads(out) if "--json" in argv else out


def run_lines(capsys: Capture, *argv: object, code: int = 0) -> list[dict[str, Any]]:
    """The objects that `run --json` and `chat --json` print."""
    assert main([*map(str, argv), "--json"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def ids_of(lines: list[dict[str, Any]]) -> list[int]:
    return [line["id"] for line in lines if "id" in line]


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def greedy(folder: Path, ids: Sequence[int], n: int) -> list[int]:
    """What the engine alone makes of a prompt, token by token."""
    with Engine.open(folder) as engine:
        state = engine.new_state()
        logits = engine.feed(state, ids)
        made = []
        for _ in range(n):
            made.append(int(np.argmax(logits)))
            logits = engine.step(state, made[-1])
    return made
