"""`python -m runtime`: results on stdout, everything else on stderr, exit codes."""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import re
import signal
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

import runtime
from container.command import exit_code_of
from runtime.__main__ import main
from runtime.commands import build_parser, info
from runtime.engine import Engine
from tests.containers import build_container, kimi_linear_config
from tests.runtime.command_line import Capture, give_stdin, run

ROOT = Path(__file__).parents[2]


def test_eval_of_ids(k3: Path, capsys: Capture, tmp_path: Path) -> None:
    dump = tmp_path / "logits.npy"
    report = run(capsys, "eval", k3, "--ids", "1,2,3", "--top", 4, "--json", "--dump-logits", dump, "--verify")
    with Engine.open(k3) as engine:
        logits = engine.evaluate([1, 2, 3]).logits
    dumped = np.load(dump)
    assert dumped.dtype == np.float32
    np.testing.assert_array_equal(dumped, logits)
    assert report["ids"] == [1, 2, 3]
    assert [token["id"] for token in report["top"]] == np.argsort(-logits[-1])[:4].tolist()
    assert report["top"][0]["logit"] == logits[-1].max()
    shares = np.exp(logits[-1].astype(np.float64))
    assert report["top"][1]["probability"] == pytest.approx(np.sort(shares / shares.sum())[-2])
    assert 10 <= report["expert_reads"] <= 30
    assert report["expert_read_bytes"] == report["expert_reads"] * 20480
    assert [path.name for path in tmp_path.iterdir()] == ["logits.npy"]


def test_eval_of_text(k3: Path, capsys: Capture) -> None:
    report = run(capsys, "eval", k3, "The library", "--json")
    with_ids = run(capsys, "eval", k3, "--ids", ",".join(map(str, report["ids"])), "--json")
    assert report["top"] == with_ids["top"]
    assert len(report["top"]) == 10
    assert all(isinstance(token["text"], str) for token in report["top"])


def test_eval_in_words(kimi_linear: Path, capsys: Capture) -> None:
    lines = run(capsys, "eval", kimi_linear, "--ids", "1", "--top", "3").splitlines()
    assert lines[0].startswith("1 tokens in ")
    assert re.search(r"\), \d+ experts read \(\d+\.\d KiB\)$", lines[0])
    assert len(lines) == 2 + 3


def test_a_dump_that_fails_leaves_the_old_file(
    kimi_linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full_disk(file: BinaryIO, _logits: object) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full_disk)
    dump = tmp_path / "logits.npy"
    dump.write_bytes(b"old")
    assert main(["eval", str(kimi_linear), "--ids", "1", "--dump-logits", str(dump)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert dump.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [dump]


def test_a_missing_dump_folder_is_noticed_before_the_work(
    kimi_linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(Engine, "open", pytest.fail)
    assert main(["eval", str(kimi_linear), "--ids", "1", "--dump-logits", str(tmp_path / "absent" / "x.npy")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_a_broken_tokenizer_is_no_obstacle_to_ids(tmp_path: Path, capsys: Capture) -> None:
    folder = build_container(tmp_path, kimi_linear_config(num_hidden_layers=2), files={"tokenizer.model": b"?"})
    assert main(["eval", str(folder), "--ids", "1", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["top"][0]["text"] is None
    assert "no tokenizer: " in shown.err
    assert main(["eval", str(folder), "text"]) == 1


def test_info(k3: Path, capsys: Capture) -> None:
    report = run(capsys, "info", k3, "--json")
    expected = {
        "arch": "kimi-k3",
        "layers": 6,
        "kda_layers": 4,
        "mla_layers": 2,
        "moe_layers": 5,
        "experts_per_layer": 8,
        "experts_per_token": 2,
        "expert_shapes": {"gate": [96, 128], "up": [96, 128], "down": [128, 96]},
        "expert_format": "VQ3R",
        "expert_record_bytes": 20480,
        "working_set_bytes": 5 * 2 * 20480,
        "provenance": {"tool": "tests", "seed": 0},
    }
    assert {key: report[key] for key in expected} == expected
    assert report["banks_bytes"] == sum(path.stat().st_size for path in k3.glob("experts-L*.bin"))
    assert report["codebooks_bytes"] == (k3 / "codebooks.bin").stat().st_size
    assert report["trunk_bytes"] == sum(each["bytes"] for each in report["trunk_formats"].values())
    assert 0 <= (k3 / "trunk.bin").stat().st_size - report["trunk_bytes"] < 64 * 400
    text = run(capsys, "info", k3)
    assert "kimi-k3" in text
    assert "200.0 KiB of experts when nothing is cached" in text


def test_long_provenance_is_shown_in_short() -> None:
    assert info._summary({"repository": "x/y", "shards": [1, 2, 3]}) == "repository x/y, shards (3 entries)"
    assert info._summary([1, 2]) == "(2 entries)"
    assert info._summary("abc") == "abc"


def test_plan_is_that_of_the_api_and_needs_the_manifest_alone(k3: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "manifest.json").write_bytes((k3 / "manifest.json").read_bytes())
    report = run(capsys, "plan", tmp_path, "--ctx", 100, "--budget", "1GiB", "--threads", 2, "--disk", 2.5, "--json")
    from_api = runtime.plan(k3, context=100, budget="1GiB", threads=2, disk_speeds=[2.5])
    for each in (report, from_api):  # the machine's own figures change from moment to moment
        del each["machine"]
    assert report == from_api
    text = run(capsys, "plan", tmp_path, "--budget", "1GiB")
    assert "200.0 KiB in all (working set)" in text


def test_a_plan_without_a_possible_budget_fails(k3: Path, capsys: Capture) -> None:
    assert main(["plan", str(k3), "--budget", "1MiB", "--json"]) == 1
    assert "at least" in json.loads(capsys.readouterr().out)["problem"]


def test_text_to_ids_and_back(k3: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The library – 图书馆 [EOS]\n"
    report = run(capsys, "tokenize", k3, text, "--json")
    assert "".join(token["text"] for token in report["tokens"] if not token["special"])
    ids = run(capsys, "tokenize", k3, text, "--ids")
    assert ids.split() == [str(token_id) for token_id in report["ids"]]
    assert run(capsys, "detokenize", k3, *ids.split()) == text + "\n"
    give_stdin(monkeypatch, ids.encode())
    assert run(capsys, "detokenize", k3, "-", "--json")["text"] == text
    lines = run(capsys, "tokenize", k3, text).splitlines()
    assert len(lines) == len(report["ids"]) + 1


def test_special_tokens_come_from_markup_alone(k3: Path, capsys: Capture) -> None:
    (special,) = run(capsys, "tokenize", k3, "[EOS]", "--markup", "--json")["tokens"]
    assert special["special"]
    assert not any(token["special"] for token in run(capsys, "tokenize", k3, "[EOS]", "--json")["tokens"])


def test_ids_that_are_none(k3: Path, capsys: Capture) -> None:
    assert main(["detokenize", str(k3), "one"]) == 2
    assert main(["detokenize", str(k3), "640"]) == 1
    assert "640 is outside the vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["eval", "--ids", "1,640"], 1, "token id 640 is outside"),
        (["run", "--ids=-1"], 1, "token id -1 is outside"),
        (["run", "some text"], 1, "no tokenizer, give token ids with --ids"),
        (["tokenize", "some text"], 1, "no tokenizer"),
        (["run"], 2, "in one way: TEXT, --file FILE or --ids"),
        (["eval", "text", "--ids", "1"], 2, "in one way: TEXT, --file FILE or --ids"),
        (["run", "--file", "{tmp}/absent"], 1, "absent: the prompt cannot be read (No such file or directory)"),
        (["run", "--ids", ""], 2, "give a prompt"),
        (["eval", "--ids", ""], 2, "the prompt has no token"),
        (
            ["run", "--ids", "1,2,3,4", "--ctx", "3"],
            1,
            "the prompt has 4 tokens, and the context has room for 3 in all",
        ),
        (["run", "--ids", "1", "--budget", "1MiB"], 1, "this container needs at least"),
        (["run", "--ids", "1", "--top-p", "0"], 2, "top-p must be above 0"),
        (["eval", "--ids", "1", "--dump-logits", "{tmp}/absent/x.npy"], 1, "logits cannot be written"),
        (["eval", "--ids", "1", "--dump-logits", "{tmp}"], 1, "logits cannot be written (it is there and no file)"),
        (["bench", "--prompt", "4", "-n", "2", "--ctx", "5"], 2, "--prompt and -n are 6 tokens, --ctx has room for 5"),
        (["run", "--ids", "1", "--session", "{tmp}/absent/x"], 1, "the session cannot be written (there is no folder"),
        (["run", "--ids", "1", "--session", "{tmp}"], 1, "is no session file"),
    ],
)
def test_errors(kimi_linear: Path, tmp_path: Path, argv: list[str], code: int, message: str, capsys: Capture) -> None:
    command, *rest = [arg.format(tmp=tmp_path) for arg in argv]
    assert main([command, str(kimi_linear), *rest]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err


@pytest.mark.parametrize("command", [["run", "x"], ["chat"]])
@pytest.mark.parametrize("options", [["--top-p", "0"], ["--stop", ""]])
def test_how_to_choose_tokens_is_checked_before_a_container_is_opened(
    tmp_path: Path, command: list[str], options: list[str], capsys: Capture
) -> None:
    name, *prompt = command
    assert main([name, str(tmp_path / "absent"), *prompt, *options]) == 2
    assert "must" in capsys.readouterr().err


def test_a_path_that_is_no_container(tmp_path: Path, capsys: Capture) -> None:
    for command in ("run", "chat", "eval", "plan", "info", "bench", "tokenize", "detokenize"):
        argv = [command, str(tmp_path / "absent"), *([] if command in ("chat", "plan", "info", "bench") else ["1"])]
        assert main(argv) == 1, command
        shown = capsys.readouterr()
        assert shown.err.startswith("error: ")
        assert "absent" in shown.err
        assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--ids", "1,x"],
        ["a", "b"],
        ["--top", "1", "a", "b"],
        ["--top", "0"],
        ["--ctx", "1" * 19],
        ["--budget", "much"],
        ["--chunk", "-1"],
        ["--frob"],
    ],
)
def test_arguments_that_are_none(kimi_linear: Path, argv: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", str(kimi_linear), *argv])
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_too_little_memory(kimi_linear: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Engine, "open", fail)
    assert main(["eval", str(kimi_linear), "--ids", "1"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {kimi_linear}: not enough memory")


def test_interrupted_while_it_opens(kimi_linear: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupt(*_: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "open", interrupt)
    assert main(["run", str(kimi_linear), "--ids", "1"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_terminal_without_unicode(kimi_linear: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "info", str(kimi_linear)],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert r"\xd7" in done.stdout


def test_as_a_process_that_loads_only_what_it_needs(kimi_linear: Path, tmp_path: Path) -> None:
    """From another folder: no compiled code for help and plan, and never torch."""
    code = f"""if True:
        import contextlib, sys
        from runtime.__main__ import main
        for argv in (["--help"], ["run", "--help"], ["bench", "--help"]):
            with contextlib.suppress(SystemExit):
                main(argv)
        assert main(["plan", {str(kimi_linear)!r}]) == main(["info", {str(kimi_linear)!r}]) == 0
        assert main(["run", {str(kimi_linear)!r}, "--ids", "1", "--session", "."]) == 1
        assert "numba" not in sys.modules
        print("---")
        code = main(["eval", {str(kimi_linear)!r}, "--ids", "1,2", "--json"])
        assert "torch" not in sys.modules and "faiss" not in sys.modules
        sys.exit(code)"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.split("---")[-1])["ids"] == [1, 2]


def test_a_process_without_standard_streams(k3: Path) -> None:
    command = f"exec {sys.executable} -m runtime tokenize {k3} - <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=120, check=False).returncode == 0


def test_what_fails_after_a_dropped_ctrl_c_was_interrupted(capsys: Capture) -> None:
    """As numba does: Ctrl-C in a callback of its compiler is dropped, then what that should have made is missing."""

    def work() -> int:
        ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
        raise RuntimeError("no compiled object")

    assert exit_code_of(work) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_modules_are_loaded(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    class Interrupted(MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "runtime.commands")
    monkeypatch.setattr(sys, "meta_path", [Interrupted()])
    assert main([]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_goes_away_is_no_traceback(kimi_linear: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "runtime", "run", str(kimi_linear), "--ids", "1", "-n", "3"],
            cwd=ROOT,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(write_end)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_every_command_and_option_is_documented() -> None:
    documented = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    (commands,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        assert f"`{name}`" in documented
        for action in parser._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help", "--json") or f"`{option}" in documented, f"{name} {option}"
