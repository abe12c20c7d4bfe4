"""Ranges of files over a line that fails: what is asked again, what is refused, what stops."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import urllib3

from container.errors import HubError, TransferError
from download.retry import Patience
from download.transfer import MOST_RESTARTS, Stopped, Transfer
from tests.download.served import REPOSITORY, SHARD, SHARD_BYTES, SMALL, SMALL_BYTES, cut_then, hasty, on_shard
from tests.hub import Fault, FaultSchedule, HubServer, Kind, Part, Planned

PIECE = slice(50_000, 250_000)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.allow("secret")
        server.add(REPOSITORY, {SHARD: SHARD_BYTES, SMALL: SMALL_BYTES})
        yield server


@pytest.fixture
def transfer() -> Iterator[Transfer]:
    transfer = hasty()
    yield transfer
    transfer.close()


def url(hub: HubServer, name: str = SHARD) -> str:
    return f"{hub.endpoint}/{REPOSITORY}/resolve/main/{name}"


def piece(hub: HubServer, transfer: Transfer) -> bytes:
    return transfer.read_range(url(hub), PIECE.start, PIECE.stop - PIECE.start, SHARD)


@pytest.mark.parametrize(
    ("start", "n_bytes"), [(0, None), (5, None), (0, 1), (299_999, 1), (50_000, 200_000), (7, 0), (0, 300_000)]
)
def test_any_range(hub: HubServer, transfer: Transfer, start: int, n_bytes: int | None) -> None:
    expected = SHARD_BYTES[start:] if n_bytes is None else SHARD_BYTES[start : start + n_bytes]
    assert transfer.read_range(url(hub), start, n_bytes, SHARD) == expected
    asked = hub.of(SHARD, Part.CDN)
    assert [one.bytes_sent for one in asked] == ([len(expected)] if expected else [])


def test_a_small_file_comes_from_the_hub(hub: HubServer, transfer: Transfer) -> None:
    assert transfer.read_range(url(hub, SMALL), 0, None, SMALL) == SMALL_BYTES


FAULTS: list[tuple[str, Fault]] = [
    ("drop", Fault(Kind.DROP)),
    ("reset", Fault(Kind.DROP, reset=True)),
    ("cut", Fault(Kind.CUT, at=70_000)),
    ("cut at once", Fault(Kind.CUT, at=0)),
    ("cut by reset", Fault(Kind.CUT, at=70_000, reset=True)),
    ("stall", Fault(Kind.STALL, at=70_000)),
    ("stalled headers", Fault(Kind.STALL_HEADERS)),
    ("other etag", Fault(Kind.ETAG)),
    ("whole file", Fault(Kind.IGNORE_RANGE)),
    ("too many", Fault(Kind.STATUS, status=429, seconds=0)),
    ("later", Fault(Kind.STATUS, status=503, seconds=1, as_date=True)),
    ("bad gateway", Fault(Kind.STATUS, status=502)),
    ("expired", Fault(Kind.STATUS, status=403)),
    ("expired url", Fault(Kind.EXPIRE)),
    ("short length", Fault(Kind.LENGTH_SHORT, at=7)),
    ("long length", Fault(Kind.LENGTH_LONG, at=7)),
    ("other start", Fault(Kind.RANGE_START, at=1)),
    ("other start", Fault(Kind.RANGE_START, at=-1)),
    ("other total", Fault(Kind.RANGE_TOTAL, at=1)),
    ("surplus", Fault(Kind.SURPLUS, at=7)),
    ("silent cut", Fault(Kind.SILENT_CUT, at=70_000)),
    ("chunked cut", Fault(Kind.CHUNKED_CUT, at=70_000)),
    ("gzip", Fault(Kind.GZIP)),
    ("loop", Fault(Kind.REDIRECT_LOOP)),
]


@pytest.mark.parametrize("fault", [fault for _, fault in FAULTS], ids=[name for name, _ in FAULTS])
def test_a_piece_arrives_whatever_fails_once(hub: HubServer, transfer: Transfer, fault: Fault) -> None:
    for schedule in (on_shard(fault), cut_then(fault)):
        hub.set_faults(schedule)
        hub.clear()
        assert piece(hub, transfer) == SHARD_BYTES[PIECE]
        assert [one.fault for one in hub.of(SHARD, Part.CDN)][: len(schedule.planned)] == [
            one.fault.kind for one in schedule.planned
        ]


def test_a_cut_piece_goes_on_where_it_was_cut(hub: HubServer, transfer: Transfer) -> None:
    hub.set_faults(on_shard(Fault(Kind.CUT, at=70_000), Fault(Kind.CUT, at=30_000)))
    assert piece(hub, transfer) == SHARD_BYTES[PIECE]
    assert [one.range_start for one in hub.of(SHARD, Part.CDN)] == [50_000, 120_000, 150_000]


def test_a_piece_with_another_etag_begins_anew(hub: HubServer, transfer: Transfer) -> None:
    hub.set_faults(FaultSchedule((*cut_then(Fault(Kind.ETAG)).planned, Planned(Part.HUB, SHARD, Fault(Kind.ETAG), 1))))
    assert piece(hub, transfer) == SHARD_BYTES[PIECE]
    assert [one.range_start for one in hub.of(SHARD, Part.CDN)] == [50_000, 150_000, 50_000]


def test_the_etag_of_the_first_hop_is_the_one_that_counts(hub: HubServer, transfer: Transfer) -> None:
    hub.set_faults(cut_then(Fault(Kind.ETAG)))  # of the storage only
    assert piece(hub, transfer) == SHARD_BYTES[PIECE]
    assert [one.range_start for one in hub.of(SHARD, Part.CDN)] == [50_000, 150_000]


def test_the_token_is_shown_to_the_hub_alone(hub: HubServer, transfer: Transfer) -> None:
    piece(hub, transfer)
    assert [(one.part, one.had_authorization) for one in hub.requests] == [(Part.HUB, True), (Part.CDN, False)]


def test_a_netrc_file_replaces_no_token(
    hub: HubServer, transfer: Transfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login a password b\nmachine localhost login a password b\n")
    monkeypatch.setenv("NETRC", str(netrc))
    hub.allow("secret", "*")
    hub.add("org/gated", {SHARD: SHARD_BYTES}, gated=True)
    found = transfer.read_range(f"{hub.endpoint}/org/gated/resolve/main/{SHARD}", 0, None, SHARD)
    assert found == SHARD_BYTES
    assert [one.had_authorization for one in hub.requests] == [True, False]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{REPOSITORY}/resolve/main/absent.json", "run the command again"),
        (f"{REPOSITORY}/resolve/nowhere/{SMALL}", "no such revision"),
        (f"org/absent/resolve/main/{SMALL}", "look at its name"),
        (f"org/gated/resolve/main/{SMALL}", "accept its conditions"),
    ],
)
def test_what_the_hub_refuses_is_not_asked_again(hub: HubServer, path: str, words: str) -> None:
    hub.add("org/gated", {SMALL: SMALL_BYTES}, gated=True)
    transfer = hasty()
    with pytest.raises(HubError, match=words) as caught:
        transfer.read_range(f"{hub.endpoint}/{path}", 0, None, "the file")
    transfer.close()
    assert str(caught.value).startswith("the file: HTTP 40")
    assert len(hub.requests) == 1


@pytest.mark.parametrize("bad", ["ftp://127.0.0.1/x", "no-url", "http://"])
def test_what_is_no_url_is_refused(transfer: Transfer, bad: str) -> None:
    with pytest.raises(HubError, match="the file"):
        transfer.read_range(bad, 0, None, "the file")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Kind.DROP),
        Fault(Kind.STATUS, status=503),
        Fault(Kind.STATUS, status=403),
        Fault(Kind.REDIRECT_LOOP),
        Fault(Kind.GZIP),
        Fault(Kind.CUT, at=0),
    ],
)
def test_patience_ends_without_a_new_byte(hub: HubServer, fault: Fault) -> None:
    hub.set_faults(FaultSchedule((Planned(Part.CDN, SHARD, fault, 0, None),)))
    transfer = hasty(Patience(base_seconds=0.001, longest_seconds=0.01, give_up_seconds=0.3, stall_seconds=1))
    with pytest.raises(TransferError, match=rf"^{SHARD}: 0 bytes .*run the same command") as caught:
        piece(hub, transfer)
    transfer.close()
    if fault.kind is Kind.STATUS:
        assert str(fault.status) in str(caught.value)
    assert len(hub.of(SHARD, Part.CDN)) > 1


def test_new_bytes_renew_patience(hub: HubServer) -> None:
    n_cuts = 40
    hub.set_faults(on_shard(*[Fault(Kind.CUT, at=200_000 // n_cuts)] * n_cuts))
    transfer = hasty(
        Patience(base_seconds=0.02, longest_seconds=0.02, give_up_seconds=0.15, stall_seconds=1, connect_seconds=1)
    )
    start = time.monotonic()
    assert piece(hub, transfer) == SHARD_BYTES[PIECE]
    transfer.close()
    assert time.monotonic() - start > 0.15


@pytest.mark.parametrize("as_date", [False, True])
def test_a_server_that_asks_for_time_gets_it(hub: HubServer, as_date: bool) -> None:
    hub.set_faults(on_shard(Fault(Kind.STATUS, status=429, seconds=2, as_date=as_date)))
    transfer = hasty(Patience(base_seconds=0.001, longest_asked_seconds=0.5))
    start = time.monotonic()
    assert piece(hub, transfer) == SHARD_BYTES[PIECE]
    transfer.close()
    assert 0.5 <= time.monotonic() - start < 2


def test_an_unreachable_server_is_tried_again() -> None:
    transfer = hasty(Patience(base_seconds=0.001, longest_seconds=0.01, give_up_seconds=0.2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TransferError, match="Connection"):
        transfer.read_range(f"http://127.0.0.1:{port}/x", 0, None, "x")
    transfer.close()


def test_a_file_that_always_begins_anew_is_given_up(hub: HubServer, transfer: Transfer) -> None:
    faults = [Fault(Kind.CUT, at=10), Fault(Kind.RANGE_START, at=1)] * (MOST_RESTARTS + 1)
    hub.set_faults(on_shard(*faults))
    with pytest.raises(TransferError, match="begun anew"):
        piece(hub, transfer)


@contextlib.contextmanager
def raw_server(*answers: Callable[[socket.socket], None], heard: list[bytes] | None = None) -> Iterator[str]:
    """A server whose every answer is a function of its connection; `heard` gets the requests."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_one(connection: socket.socket, answer: Callable[[socket.socket], None]) -> None:
            with connection, contextlib.suppress(OSError):  # the client may have had enough
                request = connection.recv(65536)
                if heard is not None:
                    heard.append(request)
                answer(connection)

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                threading.Thread(target=answer_one, args=(connection, answer), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        thread.join()


def says(answer: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(answer)


def test_surplus_bytes_make_an_answer_wrong() -> None:
    surplus = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 5-7/100\r\n\r\nxyz?"
    good = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 5-7/100\r\nContent-Length: 3\r\n\r\nabc"
    transfer = hasty()
    heard: list[bytes] = []
    with raw_server(says(surplus), says(good), heard=heard) as url:
        assert transfer.read_range(url, 5, 3, "x") == b"abc"
    transfer.close()
    assert [b"\r\nRange: bytes=5-7\r\n" in request for request in heard] == [True, True]


def test_no_encoding_is_asked_for() -> None:
    transfer = Transfer(headers=lambda: {"accept-encoding": "gzip"}, seed=0)
    heard: list[bytes] = []
    with raw_server(says(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"), heard=heard) as url:
        assert transfer.read_range(url, 0, None, "x") == b"abc"
    transfer.close()
    assert heard[0].lower().count(b"accept-encoding: identity\r\n") == 1
    assert heard[0].lower().count(b"accept-encoding") == 1


def test_a_redirect_with_an_endless_body_is_followed() -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 307 Found\r\nLocation: {url}\r\n\r\n".encode())
        while True:
            connection.sendall(bytes(1 << 16))

    transfer = hasty(Patience(connect_seconds=10, stall_seconds=10))
    with raw_server(endless, says(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")) as url:
        start = time.monotonic()
        assert transfer.read_range(url, 0, None, "x") == b"abc"
    assert time.monotonic() - start < 5
    transfer.close()


@pytest.mark.parametrize("target", ["http://[bad/x", "http://a:99999/x", "http://a:b/x"])
def test_a_redirect_to_nowhere_is_asked_again(target: str) -> None:
    nowhere = says(f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode())
    transfer = hasty()
    with raw_server(nowhere, says(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")) as url:
        assert transfer.read_range(url, 0, None, "x") == b"abc"
    transfer.close()


def test_a_token_that_cannot_be_sent_is_not_shown() -> None:
    transfer = Transfer(headers=lambda: {"Authorization": "Bearer secret\n"})
    with pytest.raises(HubError, match="HF_TOKEN") as caught:
        transfer.read_range("http://127.0.0.1:9/x", 0, None, "x")
    transfer.close()
    assert "secret" not in str(caught.value)


def test_an_untrusted_certificate_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")
    wrapped = urllib3.exceptions.MaxRetryError(urllib3.HTTPConnectionPool("h"), "/x?signature=s", reason)

    def get(*_: Any, **__: Any) -> None:
        raise requests.exceptions.SSLError(wrapped)

    monkeypatch.setattr("requests.Session.get", get)
    transfer = hasty()
    with pytest.raises(HubError, match=r"certificate is not trusted: .*self-signed") as caught:
        transfer.read_range("https://h/x", 0, None, "x")
    transfer.close()
    assert "signature=" not in str(caught.value)


def test_a_defect_is_raised_where_the_bytes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("requests.Session.get", get)
    transfer = hasty()
    with pytest.raises(ZeroDivisionError):
        transfer.read_range("http://h/x", 0, None, "x")
    transfer.close()


@pytest.mark.parametrize("n_at_once", [5, 50])
def test_a_trickle_is_a_stall(n_at_once: int) -> None:
    slow = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + bytes(1000)

    def trickle(connection: socket.socket) -> None:
        connection.sendall(slow[:n_at_once])
        for n in range(n_at_once, len(slow)):
            connection.sendall(slow[n : n + 1])
            time.sleep(0.02)

    good = says(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")
    transfer = hasty(Patience(base_seconds=0.001, stall_seconds=0.2, connect_seconds=0.1))
    with raw_server(trickle, good) as url:
        start = time.monotonic()
        assert transfer.read_range(url, 0, None, "x") == b"abc"
    assert time.monotonic() - start < 3
    transfer.close()


def test_a_slow_but_steady_line_is_none() -> None:
    def steady(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
        for _ in range(10):
            time.sleep(0.1)
            connection.sendall(bytes(1000))

    transfer = hasty(Patience(base_seconds=0.001, stall_seconds=0.3, connect_seconds=1))
    with raw_server(steady) as url:
        assert transfer.read_range(url, 0, None, "x") == bytes(10_000)
    transfer.close()


@pytest.mark.parametrize(
    "fault", [Fault(Kind.STALL, at=1000), Fault(Kind.STALL_HEADERS), Fault(Kind.STATUS, status=500)]
)
def test_a_stop_is_heeded_within_a_second(hub: HubServer, fault: Fault) -> None:
    hub.set_faults(FaultSchedule((Planned(Part.CDN, SHARD, fault, 0, None),)))
    transfer = hasty(Patience(base_seconds=1000, longest_seconds=1000))
    threading.Timer(0.2, transfer.stop.set).start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        piece(hub, transfer)
    assert time.monotonic() - start < 1.2
    with pytest.raises(Stopped):
        transfer.read_range(url(hub, SMALL), 0, None, SMALL)
    if fault.kind is Kind.STALL:  # the receiver ends, too, though its socket has a minute
        for thread in threading.enumerate():
            if thread.name == "receive":
                thread.join(timeout=2)
                assert not thread.is_alive()
    transfer.close()


def test_a_stop_ends_a_slow_transfer(hub: HubServer) -> None:
    transfer = hasty(max_bytes_per_second=10_000)
    threading.Timer(0.2, transfer.stop.set).start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        piece(hub, transfer)
    assert time.monotonic() - start < 1.2
    transfer.close()


def test_the_rate_is_bounded_over_all_threads(hub: HubServer) -> None:
    transfer = hasty(max_bytes_per_second=1_000_000)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(piece(hub, transfer))) for _ in range(3)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    transfer.close()
    assert found == [SHARD_BYTES[PIECE]] * 3
    assert 0.59 < seconds < 1.5


def test_connections_are_used_again(hub: HubServer, transfer: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    n_made = 0
    made = urllib3.util.connection.create_connection

    def counted(*args: Any, **kwargs: Any) -> socket.socket:
        nonlocal n_made
        n_made += 1
        return made(*args, **kwargs)

    monkeypatch.setattr(urllib3.util.connection, "create_connection", counted)
    for _ in range(5):
        assert transfer.read_range(url(hub, SMALL), 0, None, SMALL) == SMALL_BYTES
    assert n_made == 1
    for _ in range(5):
        assert piece(hub, transfer) == SHARD_BYTES[PIECE]
    assert n_made == 2  # and one to the storage
