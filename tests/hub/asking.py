"""A small repository, and plain clients that see what the loopback hub really sends."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import requests
from huggingface_hub import hf_hub_url

from tests.hub.server import HubServer

REPO = "org/name"
CONFIG = b'{"model_type": "tiny"}'
WEIGHTS = bytes(range(256)) * 300
FILES = {"config.json": CONFIG, "sub/a.json": b"[]", "model.safetensors": WEIGHTS, "tiktoken.model": b"YQ== 0\n"}


def get(url: str, method: str = "GET", **headers: str) -> requests.Response:
    """One request on a connection of its own, redirects not followed, nothing decoded or asked beside `headers`."""
    with requests.Session() as session:
        session.trust_env = False
        session.headers.clear()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return session.request(method, url, headers=names, allow_redirects=False, timeout=10)


def resolve(hub: HubServer, name: str, revision: str = "main") -> str:
    return hf_hub_url(REPO, name, revision=revision, endpoint=hub.endpoint)


def signed(hub: HubServer, name: str = "model.safetensors") -> str:
    return get(resolve(hub, name)).headers["Location"]


@dataclass(frozen=True)
class Seen:
    """All that came over one connection."""

    status: int
    headers: dict[str, str]
    body: bytes
    reset: bool

    @property
    def declared(self) -> int | None:
        return int(self.headers["content-length"]) if "content-length" in self.headers else None


def received(connection: socket.socket) -> tuple[bytes, bool]:
    """Everything up to the end, and whether that was an RST."""
    pieces = []
    try:
        while piece := connection.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        return b"".join(pieces), True
    return b"".join(pieces), False


def ask(hub: HubServer, path: str, method: str = "GET", **headers: str) -> Seen:
    """One request on a bare socket that reads until the server closes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        raw, reset = received(connection)
    if not raw:
        return Seen(0, {}, b"", reset)
    head, _, body = raw.partition(b"\r\n\r\n")
    status_line, *header_lines = head.decode().split("\r\n")
    fields = (line.partition(": ") for line in header_lines)
    return Seen(int(status_line.split()[1]), {name.lower(): value for name, _, value in fields}, body, reset)
