"""The loopback hub as a plain HTTP client sees it: ranges, signed URLs, records, rates, threads."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
from huggingface_hub import hf_hub_url

from tests.hub import HubServer, Part
from tests.hub.asking import CONFIG, FILES, REPO, WEIGHTS, get, resolve, signed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(REPO, FILES)
        yield server


def test_the_redirect_to_storage(hub: HubServer) -> None:
    reply = get(resolve(hub, "model.safetensors"), "HEAD")
    assert reply.status_code == 302
    assert reply.headers["X-Linked-ETag"] == f'"{hashlib.sha256(WEIGHTS).hexdigest()}"'
    assert reply.headers["X-Linked-Size"] == str(len(WEIGHTS))
    assert len(reply.headers["X-Repo-Commit"]) == 40
    target = urlsplit(reply.headers["Location"])
    assert (target.hostname, target.port) == ("localhost", hub.port)
    assert get(reply.headers["Location"]).headers["ETag"] != reply.headers["X-Linked-ETag"]
    assert get(reply.headers["Location"].replace("signature=", "signature=0")).status_code == 403


@pytest.mark.parametrize(
    ("asked", "status", "span"),
    [
        ("bytes=0-", 206, (0, 76800)),
        ("bytes=100-", 206, (100, 76800)),
        ("bytes=100-199", 206, (100, 200)),
        ("bytes=76799-", 206, (76799, 76800)),
        ("bytes=100-999999", 206, (100, 76800)),
        ("bytes=-10", 206, (76790, 76800)),
        ("bytes=76800-", 416, None),
        ("bytes=5-4", 200, (0, 76800)),
        ("bytes=0-1,5-6", 200, (0, 76800)),
        ("lines=1-2", 200, (0, 76800)),
    ],
)
def test_ranges(hub: HubServer, asked: str, status: int, span: tuple[int, int] | None) -> None:
    reply = get(signed(hub), Range=asked)
    assert reply.status_code == status
    assert reply.content == (WEIGHTS[slice(*span)] if span else b"")
    told = {206: f"bytes {span[0]}-{span[1] - 1}/76800" if span else None, 416: "bytes */76800"}
    assert reply.headers.get("Content-Range") == told.get(status)


def test_a_range_of_a_small_file(hub: HubServer) -> None:
    url = resolve(hub, "config.json")
    assert get(url).headers["Accept-Ranges"] == "bytes"
    reply = get(url, Range="bytes=3-", If_Range=get(url).headers["ETag"])
    assert (reply.status_code, reply.content) == (206, CONFIG[3:])
    assert get(url, Range="bytes=3-", If_Range='"other"').status_code == 200


def test_records(hub: HubServer) -> None:
    url = signed(hub)
    hub.clear()
    get(url, Range="bytes=10-19", Authorization="Bearer hf_x")
    get(url, "HEAD")
    get(hub.endpoint + "/nothing")
    first, second, third = hub.requests
    assert (first.method, first.path, first.part) == ("GET", urlsplit(url).path, Part.CDN)
    assert (first.name, first.range_start, first.range_stop) == ("model.safetensors", 10, 20)
    assert (first.had_authorization, first.status, first.bytes_sent, first.fault) == (True, 206, 10, None)
    assert (second.method, second.range_start, second.status, second.bytes_sent) == ("HEAD", None, 200, 0)
    assert (third.name, third.status, third.had_authorization) == ("", 404, False)
    assert hub.bytes_sent("model.safetensors") == 10
    assert hub.of("model.safetensors", Part.HUB) == []


def test_something_happens_just_before_an_answer(hub: HubServer) -> None:
    repository = hub.add(REPO, FILES)

    def move_main(part: Part, name: str) -> None:
        if (part, name) == (Part.HUB, "config.json"):
            repository.commit({"config.json": b"moved"})

    hub.on_request = move_main
    assert get(resolve(hub, "sub/a.json")).content == b"[]"
    assert get(resolve(hub, "config.json")).content == b"moved"


def test_connections_stay_open(hub: HubServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    with contextlib.closing(connection):
        connection.connect()
        socket = connection.sock
        for method, expected in (("GET", CONFIG), ("HEAD", b""), ("GET", CONFIG)):
            connection.request(method, f"/{REPO}/resolve/main/config.json")
            assert connection.getresponse().read() == expected
        assert connection.sock is socket


def test_signed_urls_work_so_often() -> None:
    with HubServer(url_uses=2) as hub:
        hub.add(REPO, FILES)
        url = signed(hub)
        assert [get(url).status_code for _ in range(4)] == [200, 200, 403, 403]
        assert get(signed(hub)).content == WEIGHTS


def test_signed_urls_work_so_long() -> None:
    with HubServer(url_seconds=0.2) as hub:
        hub.add(REPO, FILES)
        url = signed(hub)
        assert get(url).status_code == 200
        time.sleep(0.25)
        assert get(url).status_code == 403
        fresh = signed(hub)
        hub.expire_urls()
        assert get(fresh).status_code == 403


def test_the_rate_is_kept() -> None:
    with HubServer(bytes_per_second=200_000) as hub:
        hub.add(REPO, FILES)
        began = time.monotonic()
        assert get(signed(hub)).content == WEIGHTS
        assert 0.3 < time.monotonic() - began < 3
        assert hub.requests[-1].bytes_sent == len(WEIGHTS)  # the sum of many pieces
        hub.set_rate(1000)
        url = signed(hub)
        failures: list[Exception] = []

        def read() -> None:
            try:
                get(url)
            except requests.RequestException as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        hub.clear()
        reader.start()
        assert hub.wait_until_sent("model.safetensors", 40)
        assert not hub.wait_until_sent("model.safetensors", len(WEIGHTS), 0.1)
        assert 40 <= hub.bytes_sent("model.safetensors") < 4000
        hub.close()
        reader.join()
        assert len(failures) == 1


def test_closing_leaves_nothing() -> None:
    before = set(threading.enumerate())
    with requests.Session() as session:
        session.trust_env = False
        with HubServer() as hub:
            hub.add(REPO, FILES)
            session.get(resolve(hub, "config.json"), timeout=10)  # stays connected
        assert set(threading.enumerate()) == before
        with pytest.raises(requests.ConnectionError):
            session.get(resolve(hub, "config.json"), timeout=10)


def test_as_a_process(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    command = [sys.executable, "-m", "tests.hub", str(tmp_path), "--repo", REPO]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            endpoint = process.stdout.readline().strip()
            assert process.stdout.readline().startswith(f"{REPO} at ")
            location = get(hf_hub_url(REPO, "model.safetensors", endpoint=endpoint)).headers["Location"]
            assert get(location).content == WEIGHTS
        finally:
            process.terminate()
