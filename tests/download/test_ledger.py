"""What the ledger remembers, whatever happened to its file: kills, editors, full disks, several threads."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.fingerprint import ShardFingerprint
from download.ledger import Ledger, Origin, Proof, Reclaimed

ORIGIN = Origin("org/name", "c" * 40)
PROOFS = [Proof(f"model-{n}.safetensors", n, f"{n:064x}") for n in range(4)]
GONE = Reclaimed("model-1.safetensors", 1, "/somewhere/out")
FINGERPRINT = ShardFingerprint(5, "a" * 64, "b" * 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".moedock" / "ledger.jsonl"


def written(path: Path) -> Ledger:
    """A ledger with every kind of line."""
    ledger = Ledger(path)
    ledger.say_source(ORIGIN)
    ledger.say_staging()
    for proof in PROOFS:
        ledger.say_proved(proof)
    ledger.say_sampled("model-2.safetensors", FINGERPRINT)
    ledger.say_disproved("model-3.safetensors")
    ledger.say_reclaimed(GONE)
    return ledger


def state(ledger: Ledger) -> object:
    return ledger.origin, ledger.is_staging, ledger.proved, ledger.sampled, ledger.reclaimed, ledger.demands_proofs


def test_what_was_said_is_read_again(path):
    ledger = written(path)
    assert ledger.proved == {proof.name: proof for proof in PROOFS[:3]}
    assert ledger.sampled == {"model-2.safetensors": FINGERPRINT}
    assert ledger.reclaimed == {GONE.name: GONE}
    assert (ledger.origin, ledger.is_staging, ledger.demands_proofs) == (ORIGIN, True, True)
    assert state(Ledger(path)) == state(ledger)


def test_the_lines_are_as_documented(path):
    """Golden: files of today must be read by every later version."""
    written(path)
    time = re.compile(r'"time": "\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"')
    lines = [time.sub('"time": "T"', line) for line in path.read_text().splitlines()]
    assert [lines[0], lines[1], lines[3], *lines[6:]] == [
        f'{{"event": "source", "repository": "org/name", "revision": "{"c" * 40}", "time": "T"}}',
        '{"event": "staging", "time": "T"}',
        f'{{"event": "proved", "file": "model-1.safetensors", "bytes": 1, "sha256": "{1:064x}", "time": "T"}}',
        f'{{"event": "sampled", "file": "model-2.safetensors", "bytes": 5, "header_sha256": "{"a" * 64}", '
        f'"sample_sha256": "{"b" * 64}", "time": "T"}}',
        '{"event": "disproved", "file": "model-3.safetensors", "time": "T"}',
        '{"event": "reclaimed", "file": "model-1.safetensors", "bytes": 1, "into": "/somewhere/out", "time": "T"}',
    ]


def test_no_ledger_says_nothing(path):
    ledger = Ledger(path)
    assert state(ledger) == (None, False, {}, {}, {}, False)
    assert not path.parent.exists()


def test_a_source_is_said_once(path):
    ledger = written(path)
    before = path.read_bytes()
    ledger.say_source(ORIGIN)
    ledger.say_staging()
    assert path.read_bytes() == before
    other = Origin("org/name", "d" * 40)
    ledger.say_source(other)
    ledger.say_source(ORIGIN)
    ledger.say_source(other)
    assert Ledger(path).origin == other
    assert path.read_bytes().count(b'"source"') == 4


def test_a_shard_fetched_again_is_here_again(path):
    written(path).say_proved(PROOFS[1])
    assert Ledger(path).reclaimed == {}
    assert Ledger(path).proved["model-1.safetensors"] == PROOFS[1]


def test_what_was_disproved_can_be_proved(path):
    written(path).say_proved(PROOFS[3])
    assert Ledger(path).proved["model-3.safetensors"] == PROOFS[3]


def test_every_truncation_keeps_what_was_whole_and_takes_more(tmp_path, path, monkeypatch):
    """A kill may leave any number of bytes: whole lines count, and the next line is not spoiled by half of one."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a thousand would take their time
    written(path)
    data = path.read_bytes()
    prefix_states = [state(Ledger(_file(tmp_path / "prefix", prefix))) for prefix in _whole_lines(data)]
    for n_bytes in range(len(data) + 1):
        copy = _file(tmp_path / "cut", data[:n_bytes])
        n_whole = data[: n_bytes + 1].count(b"\n")  # a line that lacks only its end is whole
        ledger = Ledger(copy)
        assert state(ledger) == prefix_states[n_whole], n_bytes
        extra = Proof("extra", 7, "7" * 64)
        ledger.say_proved(extra)
        assert Ledger(copy).proved == {**ledger.proved, "extra": extra}
        assert copy.read_bytes().startswith(data[:n_bytes])


def _whole_lines(data: bytes) -> list[bytes]:
    lines = data.splitlines(keepends=True)
    return [b"".join(lines[:n]) for n in range(len(lines) + 1)]


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\n\n\n"),
        lambda data: data.replace(b"\n", b" \t\n"),
        lambda data: data.rstrip(b"\n"),
        lambda data: b"# a note\n" + data + b'{"event": "proved"}\n{"event": 5}\n[]\nnull\n"x"\n\xff\xfe\n',
        lambda data: data + b'{"event": "proved", "file": "x", "bytes": -1, "sha256": ""}\n',
        lambda data: data + b'{"event": "proved", "file": "x", "bytes": true, "sha256": ""}\n',
        lambda data: data + b'{"event": "proved", "file": ["x"], "bytes": 1, "sha256": ""}\n',
        lambda data: data + b'{"event": "proved", "file": "x", "bytes": 1.5, "sha256": ""}\n',
        lambda data: data + b'{"event": "reclaimed", "file": "model-2.safetensors", "bytes": 1}\n',
        lambda data: data + b'{"event": "source", "repository": null, "revision": "x"}\n',
        lambda data: data + b'{"event": "sampled", "file": "x", "bytes": "1", "header_sha256": "", "sample_sha256": 1}',
        lambda data: data + b'{"event": "from a later version", "file": "x"}\n',
        lambda data: data + b"[" * 100_000 + b"\n",
    ],
)  # fmt: skip
def test_editors_and_nonsense_do_no_harm(path, edit):
    expected = state(written(path))
    path.write_bytes(edit(path.read_bytes()))
    assert state(Ledger(path)) == expected
    Ledger(path).say_proved(PROOFS[3])
    assert Ledger(path).proved == {proof.name: proof for proof in PROOFS}


@given(st.binary(max_size=300))
def test_any_bytes_are_a_ledger(tmp_path, data):
    path = _file(tmp_path / "ledger", data)
    Ledger(path).say_proved(PROOFS[0])
    assert Ledger(path).proved[PROOFS[0].name] == PROOFS[0]


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=10)


@given(st.lists(st.tuples(NAMES, st.integers(0, 2**63), st.booleans()), max_size=8))
def test_the_last_word_counts(tmp_path, events):
    path = tmp_path / "ledger"
    path.unlink(missing_ok=True)
    ledger = Ledger(path)
    expected: dict[str, Proof] = {}
    for name, n_bytes, holds in events:
        if holds:
            expected[name] = Proof(name, n_bytes, "0" * 64)
            ledger.say_proved(expected[name])
        else:
            expected.pop(name, None)
            ledger.say_disproved(name)
    assert ledger.proved == expected
    assert Ledger(path).proved == expected


def test_threads_do_not_mix_their_lines(path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: time.sleep(0) or write(descriptor, bytes(data)[:50]))
    ledger = Ledger(path)
    ready = threading.Barrier(4)

    def say(thread: int) -> None:
        ready.wait()
        for n in range(20):
            ledger.say_proved(Proof(f"{thread}/{n}", n, "0" * 64))

    threads = [threading.Thread(target=say, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Ledger(path).proved) == 80
    assert Ledger(path).proved == ledger.proved
    assert len([json.loads(line) for line in path.read_bytes().splitlines()]) == 80


def test_a_disk_that_takes_a_part_at_a_time(path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:7]))
    written(path)
    monkeypatch.undo()
    assert Ledger(path).proved == {proof.name: proof for proof in PROOFS[:3]}


def test_a_line_is_on_the_disk_before_it_counts(path, monkeypatch):
    """A full disk: the caller hears of it, and nothing is remembered that is not durable."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    ledger = Ledger(path)
    ledger.say_source(ORIGIN)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        ledger.say_proved(PROOFS[0])
    assert ledger.proved == {}


def test_the_documented_lines(path):
    """docs/download.md's table of events: no other events, and each with these keys and a time."""
    text = (Path(__file__).parents[2] / "docs" / "download.md").read_text(encoding="utf-8")
    section = text.split("## The ledger")[1].split("\n## ")[0]
    documented = {
        event: re.findall(r"`(\w+)`", keys)
        for event, keys in re.findall(r"^\| `(\w+)` \| ([^|]*)\|", section, flags=re.MULTILINE)
        if event != "event"
    }
    ledger = Ledger(path)
    ledger.say_source(ORIGIN)
    ledger.say_staging()
    ledger.say_proved(PROOFS[0])
    ledger.say_disproved(PROOFS[0].name)
    ledger.say_sampled(PROOFS[0].name, FINGERPRINT)
    ledger.say_reclaimed(GONE)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert {line["event"]: [key for key in line if key not in ("event", "time")] for line in lines} == documented
    assert all("time" in line for line in lines)
    assert len(lines) == len([name for name in dir(Ledger) if name.startswith("say_")])
