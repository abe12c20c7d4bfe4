"""Every fault as it shows on the wire."""

from __future__ import annotations

import email.utils
import gzip
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from tests.hub import Fault, FaultSchedule, HubServer, Kind, Part, Planned
from tests.hub.asking import CONFIG, FILES, REPO, WEIGHTS, Seen, ask, received

N_WEIGHTS = len(WEIGHTS)
CONFIG_PATH = f"/{REPO}/resolve/main/config.json"
MODEL_PATH = f"/{REPO}/resolve/main/model.safetensors"
LISTING_PATH = f"/api/models/{REPO}"


def signed_path(hub: HubServer) -> str:
    """A signed URL, got without touching the counts of the faults."""
    target = urlsplit(ask(hub, MODEL_PATH).headers["location"])
    return f"{target.path}?{target.query}"


@pytest.fixture(params=["memory", "disk"])
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        if request.param == "disk":
            for name, content in FILES.items():
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_bytes(content)
            server.add(REPO, tmp_path)
        else:
            server.add(REPO, FILES)
        yield server


def on_cdn(hub: HubServer, fault: Fault, **headers: str) -> Seen:
    """The big file's bytes with a fault in them; the request after it must be right again."""
    path = signed_path(hub)
    hub.set_faults(FaultSchedule((Planned(Part.CDN, "model.safetensors", fault),)))
    seen = ask(hub, path, **headers)
    assert hub.requests[-1].fault is fault.kind
    if fault.kind is not Kind.EXPIRE:
        assert ask(hub, path).body == WEIGHTS
    return seen


@pytest.mark.parametrize("reset", [False, True])
def test_drop(hub: HubServer, reset: bool) -> None:
    seen = on_cdn(hub, Fault(Kind.DROP, reset=reset))
    assert (seen.status, seen.body, seen.reset) == (0, b"", reset)
    assert hub.requests[-2].status == 0


@pytest.mark.parametrize("at", [0, 1, 1000, N_WEIGHTS - 1, N_WEIGHTS])
def test_cut(hub: HubServer, at: int) -> None:
    seen = on_cdn(hub, Fault(Kind.CUT, at=at))
    assert (seen.status, seen.declared, seen.body, seen.reset) == (200, N_WEIGHTS, WEIGHTS[:at], False)
    assert hub.requests[-2].bytes_sent == at


def test_cut_of_a_range(hub: HubServer) -> None:
    seen = on_cdn(hub, Fault(Kind.CUT, at=10), Range="bytes=500-")
    assert (seen.status, seen.body) == (206, WEIGHTS[500:510])


def test_cut_by_reset(hub: HubServer) -> None:
    seen = on_cdn(hub, Fault(Kind.CUT, at=5000, reset=True))
    assert seen.reset
    assert WEIGHTS[:5000].startswith(seen.body)


def test_a_stall_that_ends(hub: HubServer) -> None:
    began = time.monotonic()
    assert on_cdn(hub, Fault(Kind.STALL, at=700, seconds=0.2)).body == WEIGHTS
    assert time.monotonic() - began >= 0.2
    assert on_cdn(hub, Fault(Kind.STALL_HEADERS, seconds=0.1)).body == WEIGHTS


@pytest.mark.parametrize(("kind", "n_bytes"), [(Kind.STALL, 700), (Kind.STALL_HEADERS, 0)])
def test_a_stall_without_end(hub: HubServer, kind: Kind, n_bytes: int) -> None:
    path = signed_path(hub)
    hub.set_faults(FaultSchedule((Planned(Part.CDN, None, Fault(kind, at=n_bytes), 0, None),)))
    hub.clear()
    with requests.Session() as session:
        session.trust_env = False
        with pytest.raises(requests.RequestException):
            session.get(f"http://127.0.0.1:{hub.port}{path}", timeout=0.15)
    (seen,) = hub.requests  # the handler noticed that the client left
    assert (seen.status, seen.bytes_sent) == (200 if n_bytes else 0, n_bytes)


def test_a_trickle(hub: HubServer) -> None:
    began = time.monotonic()
    assert on_cdn(hub, Fault(Kind.TRICKLE, at=1000), Range="bytes=0-199").body == WEIGHTS[:200]
    assert 0.15 < time.monotonic() - began < 2


def test_closing_the_server_ends_stalls(hub: HubServer) -> None:
    path = signed_path(hub)
    hub.set_faults(FaultSchedule((Planned(Part.CDN, None, Fault(Kind.STALL, at=9), 0, None),)))
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert hub.wait_until_sent("model.safetensors", 9)
        hub.close()
        assert received(connection)[0].endswith(b"\r\n\r\n" + WEIGHTS[:9])


def test_the_whole_file_for_a_range(hub: HubServer) -> None:
    seen = on_cdn(hub, Fault(Kind.IGNORE_RANGE), Range="bytes=500-")
    assert (seen.status, seen.body) == (200, WEIGHTS)
    assert "content-range" not in seen.headers


def test_another_etag(hub: HubServer) -> None:
    right = ask(hub, signed_path(hub)).headers["etag"]
    seen = on_cdn(hub, Fault(Kind.ETAG), Range="bytes=500-", If_Range=right)
    assert (seen.status, seen.body) == (206, WEIGHTS[500:])
    assert seen.headers["etag"] != right
    assert len(seen.headers["etag"]) == len(right)
    stale = on_cdn(hub, Fault(Kind.ETAG), Range="bytes=500-", If_Range='"stale"')
    assert stale.status == 206
    right = ask(hub, MODEL_PATH, "HEAD").headers["x-linked-etag"]
    hub.set_faults(FaultSchedule((Planned(Part.HUB, "model.safetensors", Fault(Kind.ETAG)),)))
    assert ask(hub, MODEL_PATH, "HEAD").headers["x-linked-etag"] != right
    assert ask(hub, MODEL_PATH, "HEAD").headers["x-linked-etag"] == right


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after(hub: HubServer, status: int) -> None:
    fault = Fault(Kind.STATUS, status=status, seconds=2)
    seen = on_cdn(hub, fault)
    assert (seen.status, seen.headers["retry-after"]) == (status, "2")
    dated = on_cdn(hub, replace(fault, seconds=60, as_date=True)).headers["retry-after"]
    assert dated.endswith(" GMT")
    assert 57 < email.utils.parsedate_to_datetime(dated).timestamp() - time.time() <= 60


@pytest.mark.parametrize("status", [403, 416, 500, 502, 504])
def test_statuses_of_the_storage(hub: HubServer, status: int) -> None:
    seen = on_cdn(hub, Fault(Kind.STATUS, status=status), Range="bytes=1-")
    assert seen.status == status
    assert "retry-after" not in seen.headers


@pytest.mark.parametrize(("status", "code"), [(401, None), (403, "GatedRepo"), (404, "EntryNotFound"), (500, None)])
@pytest.mark.parametrize("path", [CONFIG_PATH, MODEL_PATH, LISTING_PATH])
def test_statuses_of_the_hub(hub: HubServer, path: str, status: int, code: str | None) -> None:
    part = Part.API if path == LISTING_PATH else Part.HUB
    hub.set_faults(FaultSchedule((Planned(part, None, Fault(Kind.STATUS, status=status)),)))
    seen = ask(hub, path)
    assert (seen.status, seen.headers.get("x-error-code")) == (status, code)
    assert ask(hub, path).status in (200, 302)


@pytest.mark.parametrize(("kind", "declared"), [(Kind.LENGTH_SHORT, N_WEIGHTS - 7), (Kind.LENGTH_LONG, N_WEIGHTS + 7)])
def test_wrong_lengths(hub: HubServer, kind: Kind, declared: int) -> None:
    seen = on_cdn(hub, Fault(kind, at=7))
    assert (seen.status, seen.declared, seen.body) == (200, declared, WEIGHTS)


@pytest.mark.parametrize(("shift", "start"), [(3, 503), (-3, 497), (-9999, 0), (99999, N_WEIGHTS - 1)])
def test_a_range_that_starts_elsewhere(hub: HubServer, shift: int, start: int) -> None:
    seen = on_cdn(hub, Fault(Kind.RANGE_START, at=shift), Range="bytes=500-")
    assert (seen.status, seen.body) == (206, WEIGHTS[start:])
    assert seen.headers["content-range"] == f"bytes {start}-{N_WEIGHTS - 1}/{N_WEIGHTS}"


def test_a_range_of_another_total(hub: HubServer) -> None:
    seen = on_cdn(hub, Fault(Kind.RANGE_TOTAL, at=5), Range="bytes=500-599")
    assert (seen.status, seen.body) == (206, WEIGHTS[500:600])
    assert seen.headers["content-range"] == f"bytes 500-599/{N_WEIGHTS + 5}"


def test_a_refused_range(hub: HubServer) -> None:
    seen = on_cdn(hub, Fault(Kind.RANGE_REFUSED), Range="bytes=500-")
    assert (seen.status, seen.headers["content-range"]) == (416, f"bytes */{N_WEIGHTS}")


@pytest.mark.parametrize("at", [0, 500, N_WEIGHTS - 1])
def test_a_flipped_byte(hub: HubServer, at: int) -> None:
    seen = on_cdn(hub, Fault(Kind.FLIP, at=at))
    assert seen.declared == N_WEIGHTS
    assert [i for i in range(N_WEIGHTS) if seen.body[i] != WEIGHTS[i]] == [at]


def test_a_byte_that_stays_flipped(hub: HubServer) -> None:
    path = signed_path(hub)
    hub.set_faults(FaultSchedule((Planned(Part.CDN, "model.safetensors", Fault(Kind.FLIP, at=500), 0, None),)))
    for _ in range(2):
        assert ask(hub, path, Range="bytes=500-").body == bytes([WEIGHTS[500] ^ 0xFF]) + WEIGHTS[501:]
        assert ask(hub, path, Range="bytes=501-").body == WEIGHTS[501:]


def test_surplus_bytes(hub: HubServer) -> None:
    seen = on_cdn(hub, Fault(Kind.SURPLUS, at=5))
    assert (seen.status, seen.declared, seen.body) == (200, None, WEIGHTS + b"\xa5" * 5)


def test_a_cut_that_nothing_tells(hub: HubServer) -> None:
    seen = on_cdn(hub, Fault(Kind.SILENT_CUT, at=500))
    assert (seen.status, seen.declared, seen.body) == (200, None, WEIGHTS[:500])
    assert "transfer-encoding" not in seen.headers


def test_a_chunked_body_cut_in_a_chunk(hub: HubServer) -> None:
    seen = on_cdn(hub, Fault(Kind.CHUNKED_CUT, at=500))
    assert seen.headers["transfer-encoding"] == "chunked"
    assert seen.declared is None
    assert seen.body == f"{N_WEIGHTS:x}\r\n".encode() + WEIGHTS[:500]
    hub.set_faults(FaultSchedule((Planned(Part.HUB, "config.json", Fault(Kind.CHUNKED_CUT, at=5)),)))
    with requests.Session() as session:
        session.trust_env = False
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            session.get(hub.endpoint + CONFIG_PATH, timeout=10)


def test_gzip_that_nobody_asked_for(hub: HubServer) -> None:
    seen = on_cdn(hub, Fault(Kind.GZIP), Range="bytes=500-", Accept_Encoding="identity")
    assert (seen.status, seen.headers["content-encoding"]) == (200, "gzip")
    assert seen.declared == len(seen.body) != N_WEIGHTS
    assert gzip.decompress(seen.body) == WEIGHTS


def test_a_redirect_loop(hub: HubServer) -> None:
    hub.set_faults(FaultSchedule((Planned(Part.HUB, "config.json", Fault(Kind.REDIRECT_LOOP)),)))
    with requests.Session() as session:
        session.trust_env = False
        session.max_redirects = 5
        with pytest.raises(requests.TooManyRedirects):
            session.get(hub.endpoint + CONFIG_PATH, timeout=10)
        assert session.get(hub.endpoint + CONFIG_PATH, timeout=10).content == CONFIG


def test_an_expired_url(hub: HubServer) -> None:
    path, other = signed_path(hub), signed_path(hub)
    hub.set_faults(FaultSchedule((Planned(Part.CDN, "model.safetensors", Fault(Kind.EXPIRE), first=1),)))
    assert [ask(hub, one).status for one in (path, path, path, other)] == [200, 403, 403, 200]


def test_a_captive_portal(hub: HubServer) -> None:
    seen = on_cdn(hub, Fault(Kind.PORTAL), Range="bytes=500-")
    assert (seen.status, seen.headers["content-type"]) == (200, "text/html")
    assert b"<html>" in seen.body
    hub.set_faults(FaultSchedule((Planned(Part.API, None, Fault(Kind.PORTAL)),)))
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(ask(hub, LISTING_PATH).body)


def test_which_requests_a_fault_hits(hub: HubServer) -> None:
    fault = Fault(Kind.STATUS, status=500)
    hub.set_faults(
        FaultSchedule(
            (Planned(Part.HUB, "config.json", fault, first=1, count=2), Planned(Part.HUB, None, fault, first=6))
        )
    )
    statuses = [ask(hub, CONFIG_PATH, method).status for method in ("GET", "HEAD", "GET", "GET")]
    assert statuses == [200, 500, 500, 200]
    assert [ask(hub, MODEL_PATH).status for _ in range(4)] == [302, 302, 500, 302]
    assert ask(hub, LISTING_PATH).status == 200


def test_every_kind_is_tried_here() -> None:
    source = Path(__file__).read_text()
    assert [kind for kind in Kind if f"Kind.{kind.name}" not in source] == []
