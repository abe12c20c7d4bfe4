"""The parts of the loopback hub, and the kinds of things that can go wrong in them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique


@unique
class Part(StrEnum):
    """The three parts of the server, each with its own request counts."""

    API = "api"  # listings; the name is "" there
    HUB = "hub"  # /ORG/NAME/resolve/...: a small file's bytes, an LFS file's redirect
    CDN = "cdn"  # an LFS file's bytes


@unique
class Kind(StrEnum):
    """Kinds of misbehaviour. `at`, `seconds`, ... are the fields of Fault that the kind reads."""

    DROP = "drop"  # the connection closes before any header
    CUT = "cut"  # it closes after `at` bytes of the body; with `reset`, by RST
    STALL = "stall"  # nothing more after `at` bytes of the body, for `seconds`, then the rest
    TRICKLE = "trickle"  # the body comes at `at` bytes per second
    STALL_HEADERS = "stall_headers"  # nothing at all for `seconds`, then the right answer
    IGNORE_RANGE = "ignore_range"  # 200 and the whole file, whatever range was asked
    ETAG = "etag"  # another ETag (and X-Linked-ETag) than before, If-Range not looked at
    STATUS = "status"  # `status`, with Retry-After where `seconds` is given (`as_date`: as an HTTP-date)
    LENGTH_SHORT = "length_short"  # Content-Length says `at` bytes fewer than are sent
    LENGTH_LONG = "length_long"  # Content-Length says `at` bytes more than are sent
    RANGE_START = "range_start"  # 206 whose Content-Range and body begin `at` bytes off the asked start
    RANGE_TOTAL = "range_total"  # 206 whose Content-Range names a total that is `at` bytes off
    RANGE_REFUSED = "range_refused"  # 416 to a range that the file has
    FLIP = "flip"  # the byte at file position `at` is inverted, where the answer covers it
    SURPLUS = "surplus"  # no Content-Length, the body ends by close, `at` extra bytes after it
    SILENT_CUT = "silent_cut"  # no Content-Length, the body ends by close after `at` bytes
    CHUNKED_CUT = "chunked_cut"  # chunked body that breaks off after `at` bytes, in a chunk
    GZIP = "gzip"  # 200 and the whole file with Content-Encoding: gzip, though not asked
    PORTAL = "portal"  # 200 and a log-in page in place of whatever was asked, as from a captive portal
    EXPIRE = "expire"  # the signed URL of the request works no more, from this request on
    REDIRECT_LOOP = "redirect_loop"  # 302 to a URL that always redirects to itself


# What no client can get past while it lasts.
_BLOCKING_KINDS = frozenset({Kind.DROP, Kind.STATUS, Kind.FLIP, Kind.PORTAL, Kind.EXPIRE, Kind.REDIRECT_LOOP})
# Those that let `at` bytes through each time: resumed often enough, the file comes in the end unless `at` is 0.
_TRICKLING_KINDS = frozenset({Kind.CUT, Kind.SILENT_CUT, Kind.CHUNKED_CUT})
_REFUSALS = frozenset({400, 401, 403, 404, 410})


@dataclass(frozen=True)
class Fault:
    """One misbehaviour; see Kind for which fields count. `seconds=None` in a stall: until the client goes away."""

    kind: Kind
    at: int = 0
    seconds: float | None = None
    status: int = 0
    as_date: bool = False
    reset: bool = False


@dataclass(frozen=True)
class Planned:
    """A fault for the requests `first` to `first + count - 1` (from 0; HEAD and GET alike) of one file in one part.

    Attributes:
        name: File in the repository, "" for the API; None for every name, then all requests of the part are counted.
        count: None for ever.
    """

    part: Part
    name: str | None
    fault: Fault
    first: int = 0
    count: int | None = 1

    @property
    def permanent(self) -> bool:
        """True where it never ends."""
        return self.count is None

    @property
    def final(self) -> bool:
        """True where nobody can get the right file from request `first` on."""
        kind = self.fault.kind
        stalled = kind is Kind.STALL_HEADERS or (kind is Kind.STALL and self.fault.at == 0)
        blocking = (
            kind in _BLOCKING_KINDS
            or (kind in _TRICKLING_KINDS and self.fault.at == 0)
            or (stalled and self.fault.seconds is None)
        )
        return self.permanent and blocking

    @property
    def discouraging(self) -> bool:
        """True where a client may rightly give up: a refusal that no new signed URL heals, a redirect loop, no end."""
        renewable = self.part is Part.CDN and self.fault.status == 403
        refused = self.fault.kind is Kind.STATUS and self.fault.status in _REFUSALS and not renewable
        astray = self.fault.kind is Kind.REDIRECT_LOOP or (self.fault.kind is Kind.PORTAL and self.part is Part.API)
        return self.permanent or refused or astray

    def covers(self, part: Part, name: str, n_before: int, n_part_before: int) -> bool:
        """Whether it hits a request that came after `n_before` of its file and `n_part_before` of its part."""
        if part != self.part or (self.name is not None and name != self.name):
            return False
        index = (n_part_before if self.name is None else n_before) - self.first
        return index >= 0 and (self.count is None or index < self.count)
