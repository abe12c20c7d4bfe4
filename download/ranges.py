"""Does an answer hold the bytes that were asked for? Without a socket."""

from __future__ import annotations

import re
from dataclasses import dataclass

from download.answer import Head, HitchError

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


class MisplacedError(HitchError):
    """The answer belongs to other bytes than those that are here: begin anew."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which bytes of a file are asked for."""

    start: int = 0
    n_bytes: int | None = None  # None: up to its end
    total: int | None = None  # bytes of the whole file, where known

    @property
    def end(self) -> int | None:
        """Behind the last byte."""
        return self.total if self.n_bytes is None else self.start + self.n_bytes

    def complete(self, have: int) -> bool:
        """Whether `have` bytes are all of them; never where the end is not known."""
        return self.end is not None and self.start + have == self.end

    def header(self, have: int) -> dict[str, str]:
        """What to ask with when `have` bytes are here."""
        offset = self.start + have
        if self.end is not None and self.end != self.total:
            return {"Range": f"bytes={offset}-{self.end - 1}"}
        return {"Range": f"bytes={offset}-"} if offset else {}


def accepted(wanted: Wanted, have: int, etag: str | None, head: Head) -> tuple[int, int | None]:
    """(offset in the file where the body begins, bytes to take of it or None for all), of a good answer.

    `etag` belongs to the `have` bytes that are here. Raises MisplacedError where they must go, or HitchError.
    """
    encoding = head.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in {"identity", ""}:
        raise HitchError(f"the server encodes the file as {encoding[:40]!r}, which nobody asked for")
    if have and head.status == 206 and head.etag != etag:
        raise MisplacedError(f"the file has changed on the server: its ETag was {etag}, and is {head.etag} now")
    length = _length(head.headers.get("Content-Length"))
    if head.status == 200:
        return 0, _whole(wanted, length)
    return wanted.start + have, _partial(wanted, have, head.headers.get("Content-Range", ""), length)


def _whole(wanted: Wanted, length: int | None) -> int | None:
    """Bytes to take of an answer that begins at the file's first byte."""
    if wanted.start:
        raise HitchError("the server sends the whole file where a piece was asked for")
    end = wanted.end
    short = length is not None and end is not None and length < end
    if short or (length is not None and wanted.total is not None and length != wanted.total):
        raise HitchError(f"Content-Length is {length} where {end} bytes are missing")
    return length if end is None else end


def _partial(wanted: Wanted, have: int, content_range: str, length: int | None) -> int | None:
    offset = wanted.start + have
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    if match is None:
        raise HitchError(f"a part of the file without a Content-Range to tell which: {content_range[:80]!r}")
    first, last = int(match[1]), int(match[2])
    total = None if match[3] == "*" else int(match[3])
    if first != offset or (total is not None and wanted.total not in {None, total}):
        raise MisplacedError(
            f"asked for bytes from {offset} of {wanted.total}, the server sends {content_range[:80]!r}"
        )
    end = wanted.end if wanted.end is not None else total
    if end is not None and last + 1 != end:
        raise HitchError(f"asked for bytes {offset} to {end - 1}, the server sends {content_range[:80]!r}")
    if length not in {None, last + 1 - first}:
        raise HitchError(f"Content-Length is {length} where {last + 1 - first} bytes are missing")
    return last + 1 - first


def _length(value: str | None) -> int | None:
    text = (value or "").strip()
    return int(text[:19]) if text.isascii() and text.isdigit() else None
