"""`run` and `chat`: answers as they are made, sessions, Ctrl-C."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.__main__ import main
from runtime.engine import Engine
from tests.containers import build_container, kimi_linear_config
from tests.runtime.command_line import Capture, give_stdin, greedy, ids_of, run, run_lines

ROOT = Path(__file__).parents[2]
DRAWS = ("--temp", "1.5", "--seed", "7")


def test_greedy_tokens_are_the_engines(k3: Path, capsys: Capture) -> None:
    lines = run_lines(capsys, "run", "--ids", "1,2,3", k3, "-n", 6)
    assert ids_of(lines) == greedy(k3, [1, 2, 3], 6)
    summary = lines[-1]["summary"]
    assert {key: summary[key] for key in ("reason", "prompt_tokens", "tokens")} == {
        "reason": "length", "prompt_tokens": 3, "tokens": 6,
    }  # fmt: skip
    assert summary["hits"] + summary["misses"] >= 5 * 10
    assert summary["read_bytes"] % 20480 == 0
    assert main(["run", str(k3), "--ids", "1,2,3", "-n", "6"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(line.get("text", "") for line in lines) + "\n"
    assert "[6 tokens in " in shown.err
    assert "-n reached]" in shown.err


def test_a_prompt_may_come_from_anywhere(
    k3: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The library –\r\n"
    (tmp_path / "prompt").write_bytes(text.encode())
    expected = ids_of(run_lines(capsys, "run", k3, text, "-n", 3))
    for way in (
        ["-n", 3, text],
        ["-n", 3, "-"],
        ["--file", "-", "-n", 3],
        ["--file", tmp_path / "prompt", "-n", 3],
    ):
        give_stdin(monkeypatch, text.encode())
        assert ids_of(run_lines(capsys, "run", k3, *way)) == expected
    give_stdin(monkeypatch, b"\xff")
    assert main(["run", str(k3), "-"]) == 2
    assert "stdin: is no UTF-8 text" in capsys.readouterr().err


def test_tokens_appear_as_they_are_made(kimi_linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the prompt and after each token but the last, what is known is flushed before the next is computed."""
    feed, shown_before_feed = Engine.feed, []

    class Output(io.StringIO):
        shown = ""

        def flush(self) -> None:
            self.shown = self.getvalue()

    output = Output()

    def watched_feed(self: Engine, *args: Any) -> Any:
        shown_before_feed.append(len(output.shown.split()))
        return feed(self, *args)

    monkeypatch.setattr(Engine, "feed", watched_feed)
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["run", str(kimi_linear), "--ids", "5", "-n", "4"]) == 0
    assert shown_before_feed == [0, 1, 2, 3]


def test_without_a_tokenizer_ids_come_out(kimi_linear: Path, capsys: Capture) -> None:
    out = run(capsys, "run", kimi_linear, "--ids", "5", "-n", 4)
    assert [int(word) for word in out.split()] == greedy(kimi_linear, [5], 4)
    assert main(["run", str(kimi_linear), "--ids", "5", "--stop", "x"]) == 2


def test_stop_strings_and_draws(k3: Path, capsys: Capture) -> None:
    drawn = ["run", k3, "story", "-n", 40, "--temp", 2, "--top-k", 50, "--top-p", 0.99, "--seed", 5]
    whole = "".join(line.get("text", "") for line in run_lines(capsys, *drawn))
    stop = whole[len(whole) // 2 :][:3]
    lines = run_lines(capsys, *drawn, "--stop", "never to come", "--stop", stop)
    assert "".join(line.get("text", "") for line in lines) == whole[: whole.index(stop)]
    assert lines[-1]["summary"]["reason"] == "stop"


def test_an_answer_ends_where_the_context_does(k3: Path, capsys: Capture) -> None:
    lines = run_lines(capsys, "run", k3, "--ids", "1,2,3", "--ctx", 8)
    assert (len(ids_of(lines)), lines[-1]["summary"]["reason"]) == (5, "context")


def test_a_damaged_record_ends_the_answer_and_is_named(tmp_path: Path, capsys: Capture) -> None:
    folder = build_container(tmp_path / "c", kimi_linear_config(num_hidden_layers=2))
    bank = folder / "experts-L1.bin"
    data = bytearray(bank.read_bytes())
    data[1000::36864] = bytes(byte ^ 1 for byte in data[1000::36864])  # in every record
    bank.write_bytes(data)
    argv = ["run", str(folder), "--ids", "1,2", "-n", "3", "--session", str(tmp_path / "s")]
    assert main([*argv, "--verify"]) == 1
    shown = capsys.readouterr()
    assert re.fullmatch(r"error: .*layer 1.*expert \d+.*crc32.*\n", shown.err)
    assert not (tmp_path / "s").exists()
    assert main(argv) == 0


def test_two_halves_are_the_whole(k3: Path, tmp_path: Path, capsys: Capture) -> None:
    """The second half in a process of its own, with another context."""
    whole = ids_of(run_lines(capsys, "run", k3, "The library", "-n", 12, *DRAWS))
    file = tmp_path / "s"
    first = ids_of(run_lines(capsys, "run", k3, "The library", "-n", 5, *DRAWS, "--session", file))
    command = [sys.executable, "-m", "runtime", "run", str(k3), "-n", "7", "--temp", "1.5", "--session", str(file)]
    done = subprocess.run(
        [*command, "--ctx", "64", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert first + ids_of([json.loads(line) for line in done.stdout.splitlines()]) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_sessions_that_are_refused(k3: Path, kimi_linear: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "s"
    run_lines(capsys, "run", k3, "--ids", "1,2,3", "-n", 5, "--session", file)
    good = file.read_bytes()
    for argv, message in [
        (["run", kimi_linear, "--session", file], "belongs to another container"),
        (["run", k3, "--ctx", 4, "--session", file], "has 7 positions, the context has room for 4; give --ctx 7"),
        (["run", k3, "--ids", "1,1,1", "--ctx", 10, "--session", file], "after 8 that are there already"),
    ]:
        assert main([str(arg) for arg in argv]) == 1
        assert message in capsys.readouterr().err
    file.write_bytes(good[:-1])
    assert main(["run", str(k3), "--session", str(file)]) == 1
    assert "damaged session" in capsys.readouterr().err
    assert file.read_bytes() == good[:-1]


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Signals that come while the model computes."""
    feed = Engine.feed

    def install(call: int, *signals: int) -> None:
        calls = iter(range(1, 1000))

        def interrupted_feed(self: Engine, *args: Any) -> Any:
            if next(calls) == call:
                for number in signals:
                    signal.raise_signal(number)
            return feed(self, *args)

        monkeypatch.setattr(Engine, "feed", interrupted_feed)

    return install


def test_ctrl_c_ends_the_answer_and_saves_it(k3: Path, tmp_path: Path, capsys: Capture, interrupt_at: Any) -> None:
    whole = ids_of(run_lines(capsys, "run", k3, "--ids", "1,2,3", "-n", 8))
    interrupt_at(3, signal.SIGINT)
    lines = run_lines(capsys, "run", k3, "--ids", "1,2,3", "-n", 8, "--session", tmp_path / "s", code=130)
    assert lines[-1]["summary"]["reason"] == "stopped"
    first = ids_of(lines)
    assert first == whole[: len(first)]
    assert 2 <= len(first) <= 3
    rest = ids_of(run_lines(capsys, "run", k3, "-n", 8 - len(first), "--session", tmp_path / "s"))
    assert first + rest == whole


def test_a_second_ctrl_c_does_not_wait(k3: Path, tmp_path: Path, capsys: Capture, interrupt_at: Any) -> None:
    interrupt_at(2, signal.SIGINT, signal.SIGINT)
    assert main(["run", str(k3), "--ids", "1", "-n", "8", "--session", str(tmp_path / "s")]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_prompt_acts_between_pieces(k3: Path, capsys: Capture, interrupt_at: Any) -> None:
    interrupt_at(1, signal.SIGINT)
    lines = run_lines(capsys, "run", k3, "--ids", "1,2,3,4,5", "--chunk", 2, code=130)
    assert len(lines) == 1
    assert lines[0]["summary"]["prompt_tokens"] == 2


@pytest.mark.parametrize("n_signals", [1, 2])
def test_a_chat_goes_on_after_ctrl_c(
    k3: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, interrupt_at: Any, n_signals: int
) -> None:
    interrupt_at(2, *[signal.SIGINT] * n_signals)
    give_stdin(monkeypatch, b"one\ntwo\n")
    lines = run_lines(capsys, "chat", k3, "-n", 4)
    summaries = [line["summary"] for line in lines if "summary" in line]
    reasons = ["stopped", "length"] if n_signals == 1 else ["length"]
    assert [summary["reason"] for summary in summaries] == reasons


def test_sigterm_ends_a_chat(k3: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, interrupt_at: Any) -> None:
    interrupt_at(2, signal.SIGTERM)
    give_stdin(monkeypatch, b"one\ntwo\n")
    lines = run_lines(capsys, "chat", k3, "-n", 4, code=130)
    assert not [line for line in lines if "summary" in line]


def test_chat_of_lines_from_a_pipe(k3: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lines in one process are the same conversation as one line each in two."""
    options = ("--system", "Be brief.", "-n", 5, "--temp", 1, "--seed", 3)
    give_stdin(monkeypatch, b"Who?\n\n  \nWhy\xff?")
    whole = run_lines(capsys, "chat", k3, *options, "--session", tmp_path / "one")
    assert len([line for line in whole if "summary" in line]) == 2
    give_stdin(monkeypatch, b"Who?\n")
    halves = run_lines(capsys, "chat", k3, *options, "--session", tmp_path / "two")
    give_stdin(monkeypatch, b"Why\xff?\n")
    halves += run_lines(capsys, "chat", k3, "-n", 5, "--temp", 1, "--session", tmp_path / "two")
    assert ids_of(halves) == ids_of(whole)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    give_stdin(monkeypatch, b"More?\n")
    assert main(["chat", str(k3), "--session", str(tmp_path / "one"), "--system", "No."]) == 2
    assert "only before the first line" in capsys.readouterr().err


def test_chat_text_has_thinking_apart_and_summaries_on_stderr(
    k3: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_stdin(monkeypatch, b"Who?\n")
    assert main(["chat", str(k3), "-n", "3"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("[thinking]\n")
    assert shown.out.endswith("\n")
    assert shown.err.count("tokens/s") == 2
    give_stdin(monkeypatch, b"Who?\n")
    assert "[thinking]" not in run(capsys, "chat", k3, "-n", 3, "--no-think")
    saved = tmp_path / "s"
    give_stdin(monkeypatch, b"Who?\n")
    run(capsys, "chat", k3, "-n", 1, "--effort", "low", "--session", saved)
    with runtime.open(k3) as model:
        model.load(saved)
        assert "thinking_effort=low" in model.tokenizer.decode(model.ids)


def test_chat_without_a_format_goes_on_from_plain_text(
    tmp_path: Path, k3: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"tokenizer.model": (k3 / "tokenizer.model").read_bytes()}
    folder = build_container(tmp_path, kimi_linear_config(num_hidden_layers=2), files=files)
    plain = ids_of(run_lines(capsys, "run", folder, "Who?", "-n", 3))
    give_stdin(monkeypatch, b"Who?\n")
    assert main(["chat", str(folder), "-n", "3", "--json"]) == 0
    shown = capsys.readouterr()
    assert ids_of([json.loads(line) for line in shown.out.splitlines()]) == plain
    assert "has no chat format: each line is continued as plain text" in shown.err


def test_chat_without_a_tokenizer_ends(kimi_linear: Path, capsys: Capture) -> None:
    assert main(["chat", str(kimi_linear)]) == 1
    assert "has no tokenizer to chat with" in capsys.readouterr().err
