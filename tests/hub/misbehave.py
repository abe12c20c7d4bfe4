"""Turns the right answer into the one a fault asks for. Pure: nothing is sent here."""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from http import HTTPStatus

from tests.hub.faults import Fault, Kind, Part
from tests.hub.replies import (
    Asked,
    Framing,
    Reply,
    body,
    error,
    file_reply,
    range_refusal,
    redirect,
    storage_error,
    with_range,
)

LOOP_PATH = "/loop"
_HUB_CODES = {401: None, 403: "GatedRepo", 404: "EntryNotFound"}


def apply(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    """The answer with the fault in it; a fault that has no meaning for it (a range fault without range) leaves it."""
    return _APPLY[fault.kind](fault, reply, asked, part)


def _whole(reply: Reply, asked: Asked) -> Reply:
    """The 200 that a server without ranges would give in place of a 206 or 416."""
    if reply.file is None or reply.status != 206:
        return reply
    return file_reply(reply.file, reply.headers["ETag"], replace(asked, range_header=None), _own_headers(reply))


def _own_headers(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name != "Content-Range"}


def _drop(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, cut_at=-1, reset=fault.reset)


def _cut(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, cut_at=fault.at, reset=fault.reset)


def _stall(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, stall_at=fault.at, stall_seconds=fault.seconds)


def _trickle(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, bytes_per_second=fault.at)


def _stall_headers(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, stall_at=-1, stall_seconds=fault.seconds)


def _ignore_range(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return _whole(reply, asked)


def _etag(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    if reply.file is not None and asked.if_range is not None and reply.status == 200:
        reply = file_reply(reply.file, reply.headers["ETag"], replace(asked, if_range=None), _own_headers(reply))
    headers = dict(reply.headers)
    for name in ("ETag", "X-Linked-ETag"):
        if name in headers:
            old = headers[name].strip('"')
            headers[name] = f'"{hashlib.sha512(f"{old} {fault.at}".encode()).hexdigest()[: len(old)]}"'
    return replace(reply, headers=headers)


def _status(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    status = fault.status
    phrase = HTTPStatus(status).phrase
    if part is Part.CDN:
        refusal = storage_error(status, phrase.replace(" ", ""))
    elif status in _HUB_CODES:
        message = "Invalid credentials in Authorization header" if status == 401 else phrase
        refusal = error(status, _HUB_CODES[status], message)
    else:
        refusal = body(status, f"<html><h1>{status} {phrase}</h1></html>".encode(), {"Content-Type": "text/html"})
    if fault.seconds is None:
        return refusal
    wait = formatdate(time.time() + fault.seconds, usegmt=True) if fault.as_date else f"{fault.seconds:.0f}"
    return replace(refusal, headers=refusal.headers | {"Retry-After": wait})


def _length_short(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, declared_bytes=max(0, reply.n_bytes - fault.at), cut_at=reply.n_bytes)


def _length_long(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, declared_bytes=reply.n_bytes + fault.at, cut_at=reply.n_bytes)


def _range_start(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    if reply.file is None or reply.status != 206:
        return reply
    size_bytes = reply.file.size_bytes
    start = min(max(0, reply.start + fault.at), size_bytes - 1)
    stop = max(start + 1, reply.stop)
    return with_range(replace(reply, start=start, stop=stop), size_bytes)


def _range_total(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    if reply.file is None or reply.status != 206:
        return reply
    return with_range(reply, reply.file.size_bytes + fault.at)


def _range_refused(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    if reply.file is None or reply.status != 206:
        return reply
    return range_refusal(reply.file.size_bytes, reply.headers)


def _flip(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, flip_offset=fault.at)


def _surplus(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, framing=Framing.CLOSE, surplus=b"\xa5" * fault.at)


def _silent_cut(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, framing=Framing.CLOSE, cut_at=fault.at)


def _chunked_cut(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return replace(reply, framing=Framing.CHUNKED, cut_at=fault.at)


def _gzip(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    if reply.file is None or reply.status not in (200, 206):
        return reply
    whole = _whole(reply, asked)
    packed = gzip.compress(b"".join(reply.file.pieces(0, reply.file.size_bytes)), compresslevel=1, mtime=0)
    return body(200, packed, whole.headers | {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})


def _portal(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return body(200, b"<html><title>Welcome to our network</title></html>", {"Content-Type": "text/html"})


def _expire(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return reply  # the server has ended the URL before it asked for the answer


def _redirect_loop(fault: Fault, reply: Reply, asked: Asked, part: Part) -> Reply:
    return redirect(LOOP_PATH)


_APPLY: dict[Kind, Callable[[Fault, Reply, Asked, Part], Reply]] = {
    Kind.DROP: _drop,
    Kind.CUT: _cut,
    Kind.STALL: _stall,
    Kind.TRICKLE: _trickle,
    Kind.STALL_HEADERS: _stall_headers,
    Kind.IGNORE_RANGE: _ignore_range,
    Kind.ETAG: _etag,
    Kind.STATUS: _status,
    Kind.LENGTH_SHORT: _length_short,
    Kind.LENGTH_LONG: _length_long,
    Kind.RANGE_START: _range_start,
    Kind.RANGE_TOTAL: _range_total,
    Kind.RANGE_REFUSED: _range_refused,
    Kind.FLIP: _flip,
    Kind.SURPLUS: _surplus,
    Kind.SILENT_CUT: _silent_cut,
    Kind.CHUNKED_CUT: _chunked_cut,
    Kind.GZIP: _gzip,
    Kind.PORTAL: _portal,
    Kind.EXPIRE: _expire,
    Kind.REDIRECT_LOOP: _redirect_loop,
}
