"""The hub's listings, by its own client from a real server, and its refusals in words."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from hypothesis import given
from hypothesis import strategies as st

from container.errors import HubError
from download.hub import Hub, is_safe_path
from download.listing import Listing
from download.retry import Patience
from download.transfer import Stopped
from tests.download.served import HASTE, REPOSITORY
from tests.download.small_model import model_files
from tests.hub import Fault, FaultSchedule, HubServer, Kind, Part, Planned

NEVER = threading.Event()


def ask(hub: HubServer, revision: str | None = None, repository: str = REPOSITORY, **options: Any) -> Listing:
    return Hub(hub.endpoint).listing(repository, revision, **{"stop": NEVER, "patience": HASTE, **options})


def on_api(*faults: Fault, count: int | None = 1) -> FaultSchedule:
    return FaultSchedule(tuple(Planned(Part.API, "", fault, n, count) for n, fault in enumerate(faults)))


def test_a_listing_has_sizes_checksums_and_the_commit(hub):
    files = model_files()
    commit = hub.add(REPOSITORY, files).find("main")
    found = ask(hub)
    assert (found.repository, found.commit) == (REPOSITORY, commit.sha)
    assert {name: file.n_bytes for name, file in found.files.items()} == {n: len(data) for n, data in files.items()}
    for name, data in files.items():
        if name.endswith(".safetensors") or name == "tiktoken.model":
            assert (found.files[name].sha256, found.files[name].git_sha1) == (hashlib.sha256(data).hexdigest(), None)
        else:
            sha1 = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            assert (found.files[name].sha256, found.files[name].git_sha1) == (None, sha1)


def test_a_url_leads_to_the_listed_commit_after_the_branch_has_moved(hub):
    repository = hub.add(REPOSITORY, {"a b#?%.txt": b"1", "sub/c": b"2"})
    listing = ask(hub)
    repository.commit({"a b#?%.txt": b"3"})
    assert ask(hub).commit != listing.commit
    assert ask(hub, listing.commit).files == listing.files
    assert Hub(hub.endpoint).url(listing, "sub/c") == f"{hub.endpoint}/{REPOSITORY}/resolve/{listing.commit}/sub/c"
    assert Hub(hub.endpoint + "/").url(listing, "a b#?%.txt").endswith("/a%20b%23%3F%25.txt")


def test_branches_have_listings_of_their_own(hub):
    repository = hub.add(REPOSITORY, {"a": b"1"})
    repository.commit({"b": b"1"}, branch="refs/pr/1")
    assert list(ask(hub, "refs/pr/1").files) == ["b"]
    assert ask(hub, "main") == ask(hub, None)


def test_a_token_opens_what_is_private(hub, monkeypatch):
    hub.add(REPOSITORY, {"a": b"1"}, private=True)
    hub.allow("secret")
    with pytest.raises(
        HubError, match=f"^{REPOSITORY}: {hub.endpoint} shows no such repository; .* it is private: log"
    ):
        ask(hub)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert list(ask(hub).files) == ["a"]
    assert Hub(hub.endpoint).headers()["authorization"] == "Bearer secret"
    with pytest.raises(HubError, match=r"org/other: .* it is private and closed to your token$"):
        ask(hub, repository="org/other")
    assert [one.had_authorization for one in hub.requests] == [False, True, True]


def test_a_token_that_the_hub_does_not_know(hub, monkeypatch):
    hub.add(REPOSITORY, {"a": b"1"})
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(HubError, match=r"refuses access \(status 401: Invalid credentials .*\); log in with"):
        ask(hub)
    assert len(hub.requests) == 1


def test_a_revision_that_is_none(hub):
    hub.add(REPOSITORY, {"a": b"1"})
    with pytest.raises(HubError, match=rf"^{REPOSITORY} has no revision 'v9'; {hub.endpoint}/{REPOSITORY} lists its"):
        ask(hub, "v9")
    assert len(hub.requests) == 1


@pytest.mark.parametrize("name", ["a/b/c", "", "a b", "https://huggingface.co/org/name", "org/name.git", "../x"])
def test_a_name_that_is_no_name(hub, name):
    with pytest.raises(HubError, match=r"is no repository's name; give it as its page's address ends: ORG/NAME"):
        ask(hub, repository=name)
    assert hub.requests == []


def test_a_gated_listing(hub):
    hub.add(REPOSITORY, {"a": b"1"})
    hub.set_faults(on_api(Fault(Kind.STATUS, status=403)))
    with pytest.raises(HubError) as error:
        ask(hub)
    page = f"{hub.endpoint}/{REPOSITORY}"
    assert str(error.value).startswith(f"org/name is gated: accept its conditions at {page}, then log in with `hf auth")


def test_a_disabled_repository(hub):
    hub.add(REPOSITORY, {"a": b"1"}).disabled = True
    with pytest.raises(HubError, match=rf"^org/name was disabled on the hub; see {hub.endpoint}/{REPOSITORY}$"):
        ask(hub)


def test_offline_mode(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"^org/name@main: HF_HUB_OFFLINE is set, so the hub is not asked; unset it"):
        ask(hub)
    assert hub.requests == []


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://x", "/hub"])
def test_an_endpoint_that_is_no_address(endpoint):
    with pytest.raises(HubError, match=r"HF_ENDPOINT must be an address like https://huggingface\.co, found"):
        Hub(endpoint).listing(REPOSITORY, stop=NEVER, patience=HASTE)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Kind.DROP),
        Fault(Kind.DROP, reset=True),
        Fault(Kind.STATUS, status=500),
        Fault(Kind.STATUS, status=503, seconds=1),
        Fault(Kind.STATUS, status=429, seconds=1),
        Fault(Kind.STATUS, status=429, seconds=1, as_date=True),
        Fault(Kind.CUT, at=20),
        Fault(Kind.LENGTH_LONG, at=5),
    ],
    ids=lambda fault: f"{fault.kind}{fault.status or ''}",
)
def test_a_hub_that_fails_is_asked_again(hub, fault):
    hub.add(REPOSITORY, {"a": b"1"})
    hub.set_faults(on_api(fault, fault))
    said: list[str] = []
    assert list(ask(hub, say=said.append).files) == ["a"]
    assert len(hub.requests) == 3
    assert len(said) == 2
    assert said[0].startswith("the hub gives no listing (")


def test_the_time_that_the_hub_asks_for_is_given(hub):
    hub.add(REPOSITORY, {"a": b"1"})
    hub.set_faults(on_api(Fault(Kind.STATUS, status=429, seconds=1)))
    began = time.monotonic()
    ask(hub, patience=Patience(base_seconds=0.001, longest_seconds=0.001))
    assert 1 <= time.monotonic() - began < 5


@pytest.mark.parametrize("status", [400, 404, 410])
def test_a_refusal_is_not_asked_again(hub, status):
    hub.add(REPOSITORY, {"a": b"1"})
    hub.set_faults(on_api(Fault(Kind.STATUS, status=status)))
    with pytest.raises(HubError, match=rf"^org/name.*\(status {status}: "):
        ask(hub)
    assert len(hub.requests) == 1


def test_a_page_in_place_of_a_listing(hub):
    hub.add(REPOSITORY, {"a": b"1"})
    hub.set_faults(on_api(Fault(Kind.PORTAL)))
    with pytest.raises(HubError, match=r"the answer for org/name@main is no listing of a repository .* HF_ENDPOINT"):
        ask(hub)


def test_nobody_there_is_given_up():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        patience = Patience(base_seconds=0.01, longest_seconds=0.05, give_up_seconds=0.3)
        began = time.monotonic()
        with pytest.raises(
            HubError, match=rf"^{endpoint} gives no listing of org/name \(.*refused.*\), asked \d+ time"
        ):
            Hub(endpoint).listing(REPOSITORY, stop=NEVER, patience=patience)
        assert 0.3 <= time.monotonic() - began < 3


def test_a_busy_hub_is_waited_for_longer_than_an_absent_one(hub, monkeypatch):
    monkeypatch.setattr("download.hub.LISTING_SECONDS", 0.2)
    hub.add(REPOSITORY, {"a": b"1"})
    patience = Patience(base_seconds=0.1, longest_seconds=0.1, give_up_seconds=20)
    hub.set_faults(on_api(*[Fault(Kind.STATUS, status=429)] * 12))
    assert list(ask(hub, patience=patience).files) == ["a"]
    hub.set_faults(on_api(Fault(Kind.STATUS, status=503), count=None))
    with pytest.raises(HubError, match="status 503"):
        ask(hub, patience=patience)


def test_more_than_patience_allows_is_not_waited_for(hub):
    hub.add(REPOSITORY, {"a": b"1"})
    hub.set_faults(on_api(Fault(Kind.STATUS, status=503, seconds=3000)))
    began = time.monotonic()
    with pytest.raises(HubError, match=r"\(status 503\), asked 1 time"):
        ask(hub, patience=Patience())
    assert time.monotonic() - began < 5


def test_a_stop_ends_the_waiting(hub):
    stop = threading.Event()
    hub.set_faults(on_api(Fault(Kind.STATUS, status=503), count=None))
    with pytest.raises(Stopped):
        ask(hub, stop=stop, patience=Patience(base_seconds=60), say=lambda line: stop.set())


def listed(monkeypatch: pytest.MonkeyPatch, **sibling: Any) -> Listing:
    """The listing when the client's library gives one file with these attributes."""
    file = {"rfilename": "a", "size": 1, "blob_id": "0" * 40, "lfs": None, **sibling}
    info = SimpleNamespace(sha="c" * 40, siblings=[SimpleNamespace(**file)])
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: info)
    return Hub("http://hub").listing(REPOSITORY, stop=NEVER, patience=HASTE)


@pytest.mark.parametrize("size", [None, -1, True, "1", 1.5])
def test_a_size_that_is_none(monkeypatch, size):
    with pytest.raises(HubError, match=r"^org/name@cccccccccccc: a is listed with the size"):
        listed(monkeypatch, size=size)


@pytest.mark.parametrize("digest", [None, "", "0" * 39, "g" * 40, 5, "0" * 64])
def test_a_checksum_that_is_none(monkeypatch, digest):
    with pytest.raises(HubError, match="a is listed without a checksum, so it could not be proved"):
        listed(monkeypatch, blob_id=digest)
    with pytest.raises(HubError, match="a is listed without a checksum, so it could not be proved"):
        listed(monkeypatch, lfs=SimpleNamespace(size=1, sha256=str(digest)[:40]))


def test_the_size_of_a_stored_file_is_not_that_of_its_pointer(monkeypatch):
    found = listed(monkeypatch, size=130, lfs=SimpleNamespace(size=10**9, sha256="5" * 64)).files["a"]
    assert (found.n_bytes, found.sha256, found.git_sha1) == (10**9, "5" * 64, None)


@pytest.mark.parametrize("commit", [None, "", "main", "C" * 40, "c" * 41])
def test_a_commit_that_is_none(monkeypatch, commit):
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: SimpleNamespace(sha=commit, siblings=[]))
    with pytest.raises(HubError, match="is no listing of a repository"):
        Hub("http://hub").listing(REPOSITORY, stop=NEVER, patience=HASTE)


HOSTILE = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a//b",
    "a/",
    "./a",
    "a/.",
    "..",
    "",
    "a\\b",
    "a\0b",
    "a\nb",
    "a\x7fb",
    "a\ud800",
    ".moedock/ledger.jsonl",
    ".MoeDock/lock",
    ".moedock",
    None,
    5,
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_astray(monkeypatch, name):
    assert not is_safe_path(name)
    with pytest.raises(HubError, match=r"^org/name@cccccccccccc: refusing a file named .*: it could land outside"):
        listed(monkeypatch, rfilename=name)


def test_a_hostile_name_from_a_server_is_refused(hub):
    hub.add(REPOSITORY, {"config.json": b"{}", "../../evil.py": b"1"})
    with pytest.raises(HubError, match=r"refusing a file named '\.\./\.\./evil\.py'"):
        ask(hub)


@pytest.mark.parametrize("name", ["a", "a/b/c", "...", ".gitattributes", "a..b", "sub/.moedock", "é ü", "-", "~"])
def test_names_that_are_fine(name):
    assert is_safe_path(name)


@given(st.text(st.sampled_from("ab./\\\0\n~é"), max_size=12))
def test_a_safe_path_stays_inside(name):
    if is_safe_path(name):
        root = Path("/root/folder")
        path = root / name
        assert root in path.parents
        assert ".." not in path.parts
        assert path.as_posix() == f"/root/folder/{name}"  # two names are two places
