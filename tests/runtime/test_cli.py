"""`python -m runtime`: results on stdout, everything else on stderr, exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from runtime import commands
from runtime.__main__ import main
from runtime.engine import Engine
from tests.containers import build_container, kimi_linear_config

ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    assert main([str(arg) for arg in argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out) if "--json" in argv else captured.out


def test_eval_of_ids(k3: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
    assert report["expert_reads"] == 30
    assert [path.name for path in tmp_path.iterdir()] == ["logits.npy"]


def test_eval_of_text(k3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "eval", k3, "The library", "--json")
    with_ids = run(capsys, "eval", k3, "--ids", ",".join(map(str, report["ids"])), "--json")
    assert report["top"] == with_ids["top"]
    assert len(report["top"]) == 10
    assert all(isinstance(token["text"], str) for token in report["top"])


def test_eval_as_text(kimi_linear: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "eval", kimi_linear, "--ids", "1", "--top", "3").splitlines()
    assert lines[0].startswith("1 tokens in ")
    assert "8 experts read (288.00 KiB)" in lines[0]
    assert len(lines) == 2 + 3


def test_info(k3: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "200.00 KiB of experts when nothing is cached" in text


def test_info_shows_long_provenance_in_short() -> None:
    assert commands._summary({"repository": "x/y", "shards": [1, 2, 3]}) == "repository x/y, shards (3 entries)"
    assert commands._summary([1, 2]) == "(2 entries)"
    assert commands._summary("abc") == "abc"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--ids", "1,640"], 1, "token id 640 is outside"),
        (["--ids=-1"], 1, "token id -1 is outside"),
        (["some text"], 1, "no tokenizer, give token ids with --ids"),
        ([], 2, "either as TEXT or with --ids"),
        (["text", "--ids", "1"], 2, "either as TEXT or with --ids"),
        (["--ids", "1", "--dump-logits", "{tmp}/absent/x.npy"], 1, "logits cannot be written"),
    ],
)
def test_errors(
    kimi_linear: Path, tmp_path: Path, argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [arg.format(tmp=tmp_path) for arg in argv]
    assert main(["eval", str(kimi_linear), *argv]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err


def test_an_empty_prompt_is_refused(k3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(k3), ""]) == 2
    assert "no token" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--ids", "1,x"], ["--ids", ""], ["--ids", "1", "--top", "0"], ["--frob"]])
def test_arguments_that_are_none(kimi_linear: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", str(kimi_linear), *argv])
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_dump_that_fails_leaves_the_old_file(
    kimi_linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_a_broken_tokenizer_is_no_obstacle_to_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build_container(tmp_path, kimi_linear_config(num_hidden_layers=2), files={"tokenizer.model": b"?"})
    report = run(capsys, "eval", folder, "--ids", "1", "--json")
    assert report["top"][0]["text"] is None
    assert main(["eval", str(folder), "text"]) == 1


def test_a_missing_dump_folder_is_noticed_before_the_work(
    kimi_linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "evaluate", pytest.fail)
    assert main(["eval", str(kimi_linear), "--ids", "1", "--dump-logits", str(tmp_path / "absent" / "x.npy")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_too_little_memory(
    kimi_linear: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Engine, "open", fail)
    assert main(["eval", str(kimi_linear), "--ids", "1"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {kimi_linear}: not enough memory")


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


def test_interrupted(kimi_linear: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "evaluate", interrupt)
    assert main(["eval", str(kimi_linear), "--ids", "1"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_as_a_process_and_without_torch(kimi_linear: Path, tmp_path: Path) -> None:
    """An evaluation as users start it, from another folder, with no torch in the process at its end."""
    code = (
        "import sys; from runtime.__main__ import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'faiss' not in sys.modules; sys.exit(code)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for start in ([sys.executable, "-c", code], [sys.executable, "-m", "runtime"]):
        done = subprocess.run(
            [*start, "eval", str(kimi_linear), "--ids", "1,2", "--json"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert json.loads(done.stdout)["ids"] == [1, 2]


def test_a_reader_that_goes_away_is_no_traceback(kimi_linear: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "runtime", "info", str(kimi_linear)],
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
    assert done.stderr == ""
