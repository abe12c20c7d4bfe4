"""Headers and fingerprints of shards that nobody fetched: those of the files, kept, and asked for once."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

import download.headers
from container.checkpoint import Checkpoint
from container.errors import DownloadError, ShardError
from container.fingerprint import SAMPLE_PIECES, file_fingerprint
from container.shards import parse_shard_header, read_shard_header
from download.folder import SourceFolder
from download.headers import FIRST_BYTES, fetch_headers, keep_headers_here, kept_headers
from download.ledger import Ledger
from download.listing import RemoteFile
from download.mirror import Mirror
from download.options import DownloadOptions
from download.session import Session, opened
from tests.download.fake_mirror import shard_content
from tests.download.served import HASTE, REPOSITORY
from tests.download.small_model import INDEX, SHARDS, index_of, serve
from tests.hub import Fault, FaultSchedule, HubServer, Kind, Part, Planned

SIZES = dict(zip(SHARDS, (100, 5_000, 200_000), strict=True))
CONTENTS = {name: shard_content(name, n_bytes) for name, n_bytes in SIZES.items()}
N_REQUESTS = 1 + SAMPLE_PIECES


@pytest.fixture
def session(hub: HubServer, tmp_path: Path) -> Iterator[Session]:
    """The hub serves three real shards; files go into tmp_path/folder."""
    serve(hub, {"config.json": b"{}", INDEX: index_of(SHARDS), **CONTENTS})
    options = DownloadOptions(repository=REPOSITORY, folder=tmp_path / "folder", endpoint=hub.endpoint, patience=HASTE)
    with opened(options, io.StringIO()) as session:
        yield session


def fetched(session: Session) -> Mirror:
    mirror = session.mirror(None)
    fetch_headers(mirror, session.transfer, io.StringIO())
    return mirror


def expected(folder: Path) -> dict[str, object]:
    """The fingerprints of the files themselves."""
    folder.mkdir()
    found = {}
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
        found[name] = file_fingerprint(folder / name, read_shard_header(folder / name))
    return found


def test_they_are_those_of_the_files(session, hub, tmp_path):
    folder = fetched(session).folder
    ledger = Ledger(folder.ledger)
    assert ledger.sampled == expected(tmp_path / "local")
    for name, content in CONTENTS.items():
        raw = folder.header(name).read_bytes()
        assert raw == content[: len(raw)]
        assert parse_shard_header(raw, len(content), folder.file(name)).data_offset == len(raw)
        assert not folder.file(name).exists()
    assert list(kept_headers(folder, ledger, SHARDS)) == list(SHARDS)
    assert {len(hub.of(name, Part.CDN)) for name in SHARDS} == {N_REQUESTS}


def test_only_what_is_needed_comes(session, hub):
    fetched(session)
    largest = SHARDS[2]
    first, *samples = sorted(hub.of(largest, Part.CDN), key=lambda one: -one.bytes_sent)
    assert first.bytes_sent == min(FIRST_BYTES, SIZES[largest])
    assert {one.bytes_sent for one in samples} == {4096}


def test_they_are_asked_for_once(session, hub):
    fetched(session)
    hub.clear()
    fetched(session)
    assert [one for one in hub.requests if one.name in SHARDS] == []


def test_one_that_is_damaged_is_asked_for_again(session, hub, tmp_path):
    folder = fetched(session).folder
    folder.header(SHARDS[0]).write_bytes(b"\0" * 20)
    folder.header(SHARDS[1]).unlink()
    hub.clear()
    ledger = Ledger(fetched(session).folder.ledger)
    assert {one.name for one in hub.requests if one.name in SHARDS} == set(SHARDS[:2])
    assert ledger.sampled == expected(tmp_path / "local")


def test_a_long_header_takes_a_second_request(session, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(download.headers, "FIRST_BYTES", 30)
    assert Ledger(fetched(session).folder.ledger).sampled == expected(tmp_path / "local")
    assert {len(hub.of(name, Part.CDN)) for name in SHARDS} == {N_REQUESTS + 1}


def test_cuts_and_refusals_do_not_matter(session, hub, tmp_path):
    faults = [
        (0, Fault(Kind.CUT, at=50)),
        (1, Fault(Kind.STATUS, status=503, seconds=0)),
        (3, Fault(Kind.DROP)),
        (5, Fault(Kind.STALL, at=3)),
        (8, Fault(Kind.STATUS, status=403)),
    ]
    hub.set_faults(FaultSchedule(tuple(Planned(Part.CDN, SHARDS[2], fault, first) for first, fault in faults)))
    assert Ledger(fetched(session).folder.ledger).sampled == expected(tmp_path / "local")


@pytest.mark.parametrize(
    ("part", "fault", "words"),
    [
        (Part.HUB, Fault(Kind.STATUS, status=404), "HTTP 404"),
        (Part.CDN, Fault(Kind.STATUS, status=500), "run the same command to continue"),
    ],
    ids=["absent", "down"],
)
def test_one_that_does_not_come_ends_it(session, hub, monkeypatch, part, fault, words):
    """With its name; the others are not waited for: where one hub fails, every header would take its patience."""
    monkeypatch.setattr(download.headers, "CONNECTIONS", 1)
    hub.set_faults(FaultSchedule((Planned(part, SHARDS[0], fault, 0, None),)))
    with pytest.raises(DownloadError, match=rf"^{SHARDS[0]}: ") as caught:
        fetched(session)
    assert words in str(caught.value)
    assert [one for one in hub.requests if one.name in SHARDS[1:]] == []
    assert session.transfer.stop.is_set()


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 8, b"\xff" * 100, b"\x02" + bytes(7) + b"{}x"], ids=len)
def test_no_safetensors_file(session, hub, content):
    serve(hub, {"config.json": b"{}", INDEX: index_of(SHARDS), **CONTENTS, SHARDS[1]: content})
    with pytest.raises(ShardError, match=SHARDS[1]):
        fetched(session)


def test_shards_that_are_here_are_read_from_the_disk(tmp_path):
    """The same headers and fingerprints as from afar; kept once; a changed file anew."""
    wanted = expected(tmp_path / "local")
    folder = SourceFolder(tmp_path / "local")
    checkpoint = Checkpoint(folder.folder, {}, {f"t{n}": name for n, name in enumerate([*SHARDS, "absent"])})
    keep_headers_here(folder, Ledger(folder.ledger), checkpoint)
    assert Ledger(folder.ledger).sampled == wanted
    assert list(kept_headers(folder, Ledger(folder.ledger), SHARDS)) == list(SHARDS)
    n_lines = len(folder.ledger.read_bytes().splitlines())
    keep_headers_here(folder, Ledger(folder.ledger), checkpoint)
    assert len(folder.ledger.read_bytes().splitlines()) == n_lines
    folder.file(SHARDS[0]).write_bytes(shard_content("another", 100))
    keep_headers_here(folder, Ledger(folder.ledger), checkpoint)
    assert len(folder.ledger.read_bytes().splitlines()) == n_lines + 1
    assert Ledger(folder.ledger).sampled != wanted


def test_kept_without_a_fingerprint_is_not_kept(tmp_path):
    """Killed between the header and the ledger's line."""
    folder = SourceFolder(tmp_path / "local")
    folder.headers.mkdir(parents=True)
    folder.header(SHARDS[0]).write_bytes(CONTENTS[SHARDS[0]])
    assert kept_headers(folder, Ledger(folder.ledger), SHARDS) == {}


def test_one_file_without_an_index(hub, tmp_path):
    serve(hub, {"config.json": b"{}", "model.safetensors": shard_content("x", 500)})
    options = DownloadOptions(repository=REPOSITORY, folder=tmp_path / "one", endpoint=hub.endpoint, patience=HASTE)
    with opened(options, io.StringIO()) as session:
        mirror = fetched(session)
        assert [file.name for file in mirror.shards()] == ["model.safetensors"]
        assert list(mirror.ledger.sampled) == ["model.safetensors"]
        assert all(isinstance(file, RemoteFile) for file in mirror.shards())
