"""The command as a user meets it: exit codes, what goes where, and the keys of --json."""

from __future__ import annotations

import json
import shutil
import signal
from subprocess import CompletedProcess

import pytest

from container.errors import BuildError
from convert.__main__ import main
from tests.convert.small import assert_same, contents, convert_here, run_cli, write_small
from tests.convert.test_dry_run import KEYS

SUMMARY_KEYS = {
    "complete", "already_complete", "n_jobs_done", "n_jobs_left", "n_weights", "elapsed_seconds", "step_seconds",
    "peak_worker_bytes", "container_bytes", "relative_error", "notes", "weights_per_second",
}  # fmt: skip
STEPS = {"read", "dequantise", "train", "encode", "write"}


@pytest.fixture
def command(capsys, in_this_process):
    """The command without a process of its own."""

    def run(*arguments) -> CompletedProcess[str]:
        try:
            code = main(["--quality", "fast", *(str(argument) for argument in arguments)])
        except SystemExit as stop:  # argparse's way out
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return CompletedProcess(arguments, code, captured.out, captured.err)

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def test_help():
    done = run_cli("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for option in ("SRC", "OUT", "--workers", "--layers", "--seed", "--trunk-bits", "--dry-run", "--json"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required"),
        (["SRC"], "required"),
        (["SRC", "OUT", "--workers", "0"], "--workers must be at least 1"),
        (["SRC", "OUT", "--workers", "x"], "invalid int value"),
        (["SRC", "OUT", "--trunk-bits", "3"], "invalid choice"),
        (["SRC", "OUT", "--seed", "-1"], "--seed must be between"),
        (["SRC", "OUT", "--layers", "5-1"], "--layers: '5-1' is neither"),
        (["SRC", "OUT", "--layers", "0-9"], "the model has layers 0 to 2, not 3"),
        (["SRC", "SRC"], "must not lie inside each other"),
        (["SRC", "SRC/out"], "must not lie inside each other"),
        (["SRC", "OUT", "--fast"], "unrecognized arguments"),
    ],
)
def test_wrong_usage(tmp_path, k3, arguments, text, command):
    places = {"SRC": str(k3.source), "OUT": str(tmp_path / "out"), "SRC/out": str(k3.source / "out")}
    done = command(*(places.get(argument, argument) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["nowhere", "n" * 300, "empty", "file"])
def test_no_checkpoint(tmp_path, source, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    done = command(tmp_path / source, tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert source in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_name_too_long_for_the_system(tmp_path, k3, command):
    done = command(k3.source, tmp_path / ("n" * 300))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert "File name too long" in done.stderr


def test_a_run_for_people(tmp_path, k3):
    done = run_cli(k3.source, tmp_path / "out", "--workers", "2")
    assert done.returncode == 0
    assert_same(tmp_path / "out", k3.files)
    for text in ("603,656 weights in ", "peak memory of a worker: ", "time: read ", "relative error of the experts: "):
        assert text in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        f"report: {tmp_path / 'out' / 'report.html'}",
        f"{tmp_path / 'out'} is complete: 1.1 MiB",
    ]
    assert "layer 1: done, relative error" in done.stderr
    assert "layer" not in done.stdout  # results here, progress there


def test_a_run_for_programs(tmp_path, k3, command):
    done = command(k3.source, tmp_path / "out", "--json", "--layers", "1")
    summary = json.loads(done.stdout)
    assert done.returncode == 0
    assert set(summary) == SUMMARY_KEYS
    assert set(summary["step_seconds"]) == STEPS
    assert (summary["complete"], summary["n_jobs_done"], summary["n_jobs_left"]) == (False, 1, 4)
    again = json.loads(command(k3.source, tmp_path / "out", "--json").stdout)
    assert (again["complete"], again["n_jobs_done"], again["already_complete"]) == (True, 4, False)
    assert again["container_bytes"] == k3.summary.container_bytes
    assert_same(tmp_path / "out", k3.files)


def test_part_of_the_layers_says_what_is_left(tmp_path, k3, command):
    done = command(k3.source, tmp_path / "out", "--layers", "0")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "4 job(s) left: run the same command without --layers to finish"


def test_a_dry_run_for_people(tmp_path, k3, command):
    done = command(k3.source, tmp_path / "out", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "kimi-k3: 603,656 weights",
        "banks:     2 × 32.0 KiB = 64.0 KiB (VQ3R records)",
        "trunk.bin:",
        "disk: ",
    ):
        assert text in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_for_programs(tmp_path, k3):
    done = run_cli(k3.source, tmp_path / "out", "--dry-run", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(json.loads(done.stdout)) == KEYS


def test_a_dry_run_with_problems_fails(tmp_path, command):
    source = write_small(tmp_path / "checkpoint")
    next(source.glob("*.safetensors")).unlink()
    done = command(source, tmp_path / "out", "--dry-run", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"]
    people = command(source, tmp_path / "out", "--dry-run")
    assert people.returncode == 1
    assert "problem: shard " in people.stdout


def test_preflight_problems_are_one_list(tmp_path, command):
    source = write_small(tmp_path / "checkpoint")
    for shard in sorted(source.glob("*.safetensors"))[:2]:
        shard.unlink()
    done = command(source, tmp_path / "out", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "error: cannot convert: 2 problem(s) found, nothing was written"
    assert [line[:10] for line in lines[1:]] == ["  - shard ", "  - shard "]
    assert not (tmp_path / "out").exists()


def test_a_complete_container_is_left_alone(tmp_path, k3, command):
    shutil.copytree(k3.output, tmp_path / "out")
    chat = tmp_path / "out" / "chat.json"
    chat.write_text('{"mine": true}')
    before = contents(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    done = command(k3.source, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'out'} is complete; `python -m validate {tmp_path / 'out'}` proves it\n"
    assert json.loads(command(k3.source, tmp_path / "out", "--json").stdout)["already_complete"] is True
    assert_same(tmp_path / "out", before)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


@pytest.mark.usefixtures("in_this_process")
def test_an_edited_chat_file_survives_the_assembly(tmp_path, k3):
    """The user may write chat.json while the conversion goes on."""
    convert_here(k3.source, tmp_path / "out", layers=frozenset({0, 1, 2}))
    (tmp_path / "out" / "chat.json").write_text('{"mine": true}')
    convert_here(k3.source, tmp_path / "out")
    assert_same(tmp_path / "out", k3.files | {"chat.json": b'{"mine": true}'})


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_damaged_complete_container_is_noticed(tmp_path, k3, damage, command):
    shutil.copytree(k3.output, tmp_path / "out")
    bank = tmp_path / "out" / "experts-L2.bin"
    if damage == "gone":
        bank.unlink()
    else:
        bank.write_bytes(bank.read_bytes()[:-1])
    done = command(k3.source, tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{bank} {'is missing' if damage == 'gone' else 'has 32767 bytes, expected 32768'}" in done.stderr
    assert "convert into a new folder" in done.stderr


@pytest.mark.usefixtures("in_this_process")
def test_a_sidecar_that_is_gone_is_noticed(tmp_path, k3):
    shutil.copytree(k3.output, tmp_path / "out")
    (tmp_path / "out" / "specials.json").unlink()
    with pytest.raises(BuildError, match=r"specials\.json is missing"):
        convert_here(k3.source, tmp_path / "out")


def test_a_foreign_manifest_is_not_touched(tmp_path, k3, command):
    output = tmp_path / "out"
    output.mkdir()
    for text in ("{", '{"format_version": 0}', k3.files["manifest.json"].decode().replace('"seed": 0', '"seed": 3')):
        (output / "manifest.json").write_text(text)
        done = command(k3.source, output)
        assert (done.returncode, done.stdout) == (1, "")
        assert "Traceback" not in done.stderr
        assert contents(output) == {"manifest.json": text.encode()}
    assert "options.seed: there 3, now 0" in done.stderr


def test_notes_are_shown(tmp_path, command):
    source = write_small(tmp_path / "checkpoint")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (source / name).unlink()
    dry = command(source, tmp_path / "out", "--dry-run")
    done = command(source, tmp_path / "out", "--workers", "1")
    for text in (dry.stdout, done.stdout):
        assert "note: no tiktoken.model or tokenizer.model in the checkpoint" in text
        assert "note: no tokenizer_config.json in the checkpoint" in text
    assert not (tmp_path / "out" / "tokenizer.model").exists()
