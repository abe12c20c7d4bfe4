"""`python -m download` as a user meets it: words, exit codes, signals; no traceback for anything."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from container.lock import held_lock
from download.__main__ import main
from download.folder import SourceFolder
from download.hub import Hub
from tests.download.served import REPOSITORY
from tests.download.small_model import (
    INDEX,
    ROOT,
    SHARDS,
    contents,
    environment,
    model_files,
    run_cli,
    serve,
    wanted_files,
)
from tests.hub import HubServer

WANTED = wanted_files()
TOTAL_BYTES = sum(map(len, WANTED.values()))

LIMITED = """
import resource, sys
from download.__main__ import main

resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Done]]:
    """The command in this process, which is quicker: a function of its arguments."""
    monkeypatch.setattr(Hub, "endpoint", hub.endpoint)
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        try:
            code = main([str(one) for one in arguments])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        return Done(code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def folder(hub: HubServer, tmp_path: Path) -> Path:
    serve(hub)
    return tmp_path / "model"


def test_help_is_quick():
    """It loads none of the libraries; and it names every option."""
    code = (
        "import sys\nfrom download.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'requests', 'huggingface_hub', 'tqdm', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for option in (
        "REPO", "DEST", "--revision", "--jobs", "--include", "--exclude", "--dry-run", "--check", "--min-free",
        "--max-rate", "--json", "HF_TOKEN", "HF_ENDPOINT",
    ):  # fmt: skip
        assert option in done.stdout


def test_a_download_in_words(hub, tmp_path, folder):
    done = run_cli(hub, tmp_path, REPOSITORY, folder)
    assert (done.returncode, contents(folder)) == (0, WANTED)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{len(WANTED)} files, 147.2 KiB fetched in ")
    assert lines[1] == f"{folder} is complete and proved: {len(WANTED)} files, 147.2 KiB"
    assert done.stderr.startswith(f"{REPOSITORY} at ")
    again = run_cli(hub, tmp_path, REPOSITORY, folder)
    assert (again.returncode, again.stdout.splitlines()) == (0, lines[1:])


def test_a_download_in_json(command, folder):
    done = command(REPOSITORY, folder, "--json", "--exclude", "README.md", "--jobs", "2")
    found = json.loads(done.stdout)
    assert (done.returncode, found["complete"], found["left_out"]) == (0, False, ["README.md"])
    assert (found["n_files"], found["folder"]) == (len(WANTED) - 1, str(folder))
    words = command(REPOSITORY, folder, "--exclude", "README.md")
    assert "left out, though a conversion needs them: README.md\n" in words.stdout
    assert words.stdout.splitlines()[-1].startswith(f"{folder} is as asked, but not a complete checkpoint: ")


def test_a_dry_run(command, folder):
    done = command(REPOSITORY, folder, "--dry-run")
    assert (done.returncode, done.stderr, folder.exists()) == (0, "", False)
    assert f"files:    {len(WANTED)} with 147.2 KiB ({TOTAL_BYTES:,} bytes) of 12 in the repository" in done.stdout
    assert "present:  0 B: 0 files proved, 0 to be proved, 0 begun\n" in done.stdout
    assert f"to fetch: 147.2 KiB in {len(WANTED)} files\n" in done.stdout
    assert all(name in done.stdout for name in WANTED)
    in_json = command(REPOSITORY, folder, "--dry-run", "--json", "--min-free", "1e6")
    assert in_json.returncode == 1
    assert json.loads(in_json.stdout)["missing_bytes"] == TOTAL_BYTES
    tight = command(REPOSITORY, folder, "--dry-run", "--min-free", "1e6")
    assert tight.returncode == 1
    assert f"problem: {json.loads(in_json.stdout)['problems'][0]}" == tight.stdout.splitlines()[-1]
    assert tight.stdout.splitlines()[-1].startswith(
        f"problem: {folder}: 147.2 KiB are still to be fetched and 909.49 Ti"
    )


def test_an_audit(command, folder):
    command(REPOSITORY, folder)
    right = command(REPOSITORY, folder, "--check", "sha256")
    assert (right.returncode, right.stderr) == (0, "")
    assert right.stdout.splitlines()[-1].endswith(f"checksums: all {len(WANTED)} files are right (147.2 KiB)")
    (folder / SHARDS[0]).write_bytes(bytes(50_000))
    (folder / "README.md").unlink()
    sizes = command(REPOSITORY, folder, "--check", "size")
    assert (sizes.returncode, sizes.stdout.splitlines()[0]) == (1, "problem: README.md: missing")
    wrong = command(REPOSITORY, folder, "--check", "sha256")
    assert wrong.returncode == 1
    assert f"problem: {SHARDS[0]}: its sha256 is " in wrong.stdout
    assert wrong.stdout.splitlines()[-2].endswith(f"checksums: 2 of {len(WANTED)} files are not right")
    assert (
        wrong.stdout.splitlines()[-1] == f"`python -m download {REPOSITORY} {folder}` fetches what is missing or wrong"
    )
    in_json = command(REPOSITORY, folder, "--check", "sha256", "--json")
    assert (in_json.returncode, len(json.loads(in_json.stdout)["problems"])) == (1, 2)
    assert command(REPOSITORY, folder).returncode == 0
    assert contents(folder) == WANTED


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["org/none", "DEST"], 1, "error: org/none: {hub} shows no such repository; the name is wrong, or"),
        (["org/gated", "DEST"], 1, f"error: {INDEX}: HTTP 401 (GatedRepo, "),
        (["a b", "DEST"], 1, "error: 'a b' is no repository's name; "),
        ([REPOSITORY, "DEST", "--revision", "x"], 1, "error: org/name has no revision 'x'; "),
        ([REPOSITORY, "FILE"], 1, "error: {tmp}/FILE: is a file; give a folder"),
        ([REPOSITORY, "FILE/DEST"], 1, "error: {tmp}/FILE/DEST/.moedock: Not a directory; mend that"),
        ([REPOSITORY, "DEST", "--check", "size"], 1, "error: {tmp}/DEST: no such folder, so there is nothing to check"),
        ([REPOSITORY, "DEST", "--min-free", "1e6"], 1, "error: {tmp}/DEST: 147.2 KiB are still to be fetched"),
        ([REPOSITORY, "DEST", "--include", "x*"], 2, "error: --include x* matches none of org/name's 12 files"),
        ([REPOSITORY, "DEST", "--jobs", "0"], 2, "error: --jobs must be from 1 to 64, found 0"),
        ([REPOSITORY, "DEST", "--jobs", "many"], 2, "usage: "),
        ([REPOSITORY], 2, "usage: "),
    ],
)  # fmt: skip
def test_refusals(hub, tmp_path, folder, command, arguments, code, message):
    serve(hub, model_files(), repository="org/gated", gated=True)
    (tmp_path / "FILE").write_bytes(b"mine")
    paths = [tmp_path / one if one in ("DEST", "FILE", "FILE/DEST") else one for one in arguments]
    done = command(*paths)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message.format(hub=hub.endpoint, tmp=tmp_path))
    assert "Traceback" not in done.stderr
    assert contents(tmp_path / "DEST") == {}


def test_a_refusal_of_the_real_process(hub, tmp_path, folder):
    done = run_cli(hub, tmp_path, "org/none", folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: org/none: {hub.endpoint} shows no such repository")
    assert len(done.stderr.splitlines()) == 1


def test_offline(hub, tmp_path, folder):
    done = run_cli(hub, tmp_path, REPOSITORY, folder, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: org/name@main: HF_HUB_OFFLINE is set, so the hub is not asked; unset it")


def test_a_token_from_the_environment(hub, tmp_path):
    serve(hub, private=True)
    hub.allow("secret")
    done = run_cli(hub, tmp_path, REPOSITORY, tmp_path / "model", HF_TOKEN="secret")
    assert (done.returncode, contents(tmp_path / "model")) == (0, WANTED)
    assert "secret" not in done.stdout + done.stderr


def test_a_second_process_is_refused(hub, tmp_path, folder):
    with held_lock(SourceFolder(folder).lock, "another download"):
        done = run_cli(hub, tmp_path, REPOSITORY, folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {folder}: another download is running here (process ")


def test_files_that_may_not_grow(hub, tmp_path, folder):
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    done = subprocess.run(
        [sys.executable, script, REPOSITORY, folder, "--jobs", "2"],
        env=environment(hub, tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr.splitlines()[-1] == f"error: {folder}: File too large; mend that, then run the same command again"
    )
    assert run_cli(hub, tmp_path, REPOSITORY, folder).returncode == 0
    assert contents(folder) == WANTED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_and_keeps_what_is_here(hub, tmp_path, folder, number):
    hub.set_rate(20_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "download", REPOSITORY, folder],
        cwd=ROOT,
        env=environment(hub, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert hub.wait_until_sent(SHARDS[0], 2000)
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 5
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted; what was fetched is kept, run the same command to continue"
    assert "Traceback" not in err
    assert SourceFolder(folder).part(SHARDS[0]).stat().st_size > 0
    hub.set_rate(None)
    assert run_cli(hub, tmp_path, REPOSITORY, folder).returncode == 0
    assert contents(folder) == WANTED
