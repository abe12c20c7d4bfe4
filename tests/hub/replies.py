"""Answers as values: what a well-behaved hub says, before any fault and before any byte is sent."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from enum import Enum
from urllib.parse import quote

from tests.hub.repositories import Commit, RepoFile, Repository

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Framing(Enum):
    """How the end of a body is told."""

    LENGTH = "Content-Length"
    CHUNKED = "chunked"
    CLOSE = "close"


@dataclass(frozen=True)
class Reply:
    """One answer. The body is bytes [start, stop) of `file`; positions named `..._at` count body bytes.

    Attributes:
        declared_bytes: Content-Length where it is not the body's.
        cut_at: The connection closes after this many bytes of the body; -1: before the status line.
        bytes_per_second: Rate where it is not the server's.
        stall_at: Nothing for `stall_seconds` (None: until the client goes away) at this body byte; -1: before headers.
        flip_offset: File position of a byte that goes out inverted.
        surplus: Goes out after the body.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    file: RepoFile | None = None
    start: int = 0
    stop: int = 0
    framing: Framing = Framing.LENGTH
    declared_bytes: int | None = None
    cut_at: int | None = None
    reset: bool = False
    bytes_per_second: int | None = None
    stall_at: int | None = None
    stall_seconds: float | None = None
    flip_offset: int | None = None
    surplus: bytes = b""

    @property
    def n_bytes(self) -> int:
        """Length of the right body."""
        return self.stop - self.start


@dataclass(frozen=True)
class Asked:
    """What of a request shapes its answer. `range_start` and `range_stop` as sent; None where open or absent."""

    method: str
    path: str
    range_header: str | None = None
    if_range: str | None = None
    token: str | None = None

    @property
    def range(self) -> tuple[int | None, int | None] | None:
        """(first, last) of a single `bytes=` range, either may be None; None without one."""
        match = _RANGE.fullmatch(self.range_header or "")
        if match is None or match.group(0) == "bytes=-":
            return None
        first, last = (int(digits) if digits else None for digits in match.groups())
        return first, last


def body(status: int, content: bytes, headers: dict[str, str]) -> Reply:
    """An answer whose body is at hand."""
    return Reply(status, headers, RepoFile("", content, False), 0, len(content))


def json_reply(value: object) -> Reply:
    return body(200, json.dumps(value).encode(), {"Content-Type": "application/json; charset=utf-8"})


def error(status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> Reply:
    """An error as the hub words it: kind and message in headers, the message once more in a JSON body."""
    named = {"X-Error-Code": code} if code else {}
    return body(
        status,
        json.dumps({"error": message}).encode(),
        {"Content-Type": "application/json; charset=utf-8", "X-Error-Message": message} | named | (headers or {}),
    )


def storage_error(status: int, code: str) -> Reply:
    """An error as the storage behind the signed URLs words it."""
    xml = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code></Error>'
    return body(status, xml.encode(), {"Content-Type": "application/xml"})


def file_reply(file: RepoFile, etag: str, asked: Asked, headers: dict[str, str]) -> Reply:
    """200, 206 or 416 for one file, by RFC 9110 sections 13.1.5 and 14."""
    size_bytes = file.size_bytes
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": etag} | headers
    whole = Reply(200, headers, file, 0, size_bytes)
    wanted = asked.range
    if wanted is None or (asked.if_range is not None and asked.if_range != etag):
        return whole
    first, last = wanted
    if first is None:
        first, last = max(0, size_bytes - (last or 0)), None
    elif last is not None and last < first:
        return whole
    if first >= size_bytes:
        return range_refusal(size_bytes, headers)
    stop = size_bytes if last is None else min(last + 1, size_bytes)
    return with_range(replace(whole, status=206, start=first, stop=stop), size_bytes)


def with_range(reply: Reply, total_bytes: int) -> Reply:
    """The same 206 with a Content-Range that fits its body."""
    told = f"bytes {reply.start}-{reply.stop - 1}/{total_bytes}"
    return replace(reply, headers=reply.headers | {"Content-Range": told})


def range_refusal(size_bytes: int, headers: dict[str, str]) -> Reply:
    """416, with the size that would have been there."""
    return body(416, b"", {"ETag": headers.get("ETag", ""), "Content-Range": f"bytes */{size_bytes}"})


def lfs_json(file: RepoFile) -> dict[str, object]:
    return {"sha256": file.sha256, "size": file.size_bytes, "pointerSize": len(file.pointer)}


def sibling(file: RepoFile, *, blobs: bool) -> dict[str, object]:
    entry: dict[str, object] = {"rfilename": file.name}
    if blobs:
        entry |= {"size": file.size_bytes, "blobId": file.blob_id}
        if file.lfs:
            entry["lfs"] = lfs_json(file)
    return entry


def model_info(repository: Repository, commit: Commit, *, blobs: bool) -> Reply:
    """`GET /api/models/ORG/NAME[/revision/REV]`."""
    return json_reply(
        {
            "_id": commit.sha[:24],
            "id": repository.repo_id,
            "modelId": repository.repo_id,
            "author": repository.repo_id.split("/")[0],
            "sha": commit.sha,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "lastModified": "2026-01-01T00:00:00.000Z",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "siblings": [sibling(file, blobs=blobs) for file in commit.files.values()],
        }
    )


def tree(commit: Commit, folder: str, *, recursive: bool) -> Reply | None:
    """`GET /api/models/ORG/NAME/tree/REV[/FOLDER]`: files and folders below it; None where there is nothing."""
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, object]] = {}
    for name, file in commit.files.items():
        if not name.startswith(prefix):
            continue
        parts = name[len(prefix) :].split("/")
        for depth in range(1, len(parts) if recursive else min(2, len(parts))):
            path = prefix + "/".join(parts[:depth])
            entries.setdefault(path, {"type": "directory", "oid": "0" * 40, "size": 0, "path": path})
        if recursive or len(parts) == 1:
            entry: dict[str, object] = {"type": "file", "oid": file.blob_id, "size": file.size_bytes, "path": name}
            if file.lfs:
                entry["lfs"] = {"oid": file.sha256, "size": file.size_bytes, "pointerSize": len(file.pointer)}
            entries[name] = entry
    return json_reply(list(entries.values())) if entries or not folder else None


def redirect(location: str, status: int = 302, headers: dict[str, str] | None = None) -> Reply:
    message = f"Found. Redirecting to {location}".encode()
    return body(status, message, {"Content-Type": "text/plain; charset=utf-8", "Location": location} | (headers or {}))


def resolve_path(repo_id: str, revision: str, name: str) -> str:
    return f"/{repo_id}/resolve/{quote(revision, safe='')}/{quote(name)}"
