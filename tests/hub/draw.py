"""The dice of random fault schedules."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.hub.kinds import Fault, Kind, Part, Planned
from tests.hub.repositories import is_lfs

_LISTING_KINDS = (Kind.DROP, Kind.STALL_HEADERS, Kind.STATUS)
_FILE_KINDS = (*_LISTING_KINDS, Kind.PORTAL, Kind.REDIRECT_LOOP)
_BODY_KINDS = (
    Kind.CUT,
    Kind.STALL,
    Kind.LENGTH_SHORT,
    Kind.LENGTH_LONG,
    Kind.FLIP,
    Kind.SURPLUS,
    Kind.SILENT_CUT,
    Kind.CHUNKED_CUT,
    Kind.GZIP,
)
# These show in a resumed request only.
_RESUMED_KINDS = (Kind.IGNORE_RANGE, Kind.ETAG, Kind.RANGE_START, Kind.RANGE_TOTAL, Kind.RANGE_REFUSED)
_LASTING_KINDS = (Kind.DROP, Kind.STATUS, Kind.FLIP, Kind.REDIRECT_LOOP)
_PASSING_STATUSES = {
    Part.API: (429, 500, 502, 503, 504),
    Part.HUB: (429, 500, 502, 503, 504),
    Part.CDN: (403, 429, 500, 502, 503, 504),
}
_REFUSING_STATUSES = {Part.API: (401, 403, 404), Part.HUB: (401, 403, 404), Part.CDN: (404,)}
_WAITING_STATUSES = (429, 503)
_LISTING_SHARE = 0.1
_CDN_SHARE = 0.75


@dataclass
class Dice:
    """What a schedule is drawn from; see FaultSchedule.random."""

    random: random.Random
    sizes: Mapping[str, int]
    refusals: bool
    stall_seconds: Sequence[float | None]
    retry_after_seconds: Sequence[int]

    def place(self, *, listings: bool) -> tuple[Part, str]:
        """A part and a file that is served there."""
        if listings and self.random.random() < _LISTING_SHARE:
            return Part.API, ""
        name = self.random.choice(sorted(self.sizes))
        return (Part.CDN if self.linked(name) and self.random.random() < _CDN_SHARE else Part.HUB), name

    def linked(self, name: str) -> bool:
        return is_lfs(name, self.sizes[name])

    def has_body(self, part: Part, name: str) -> bool:
        """Whether the file's own bytes come from that part."""
        return part is not Part.API and (part is Part.CDN) == self.linked(name) and self.sizes[name] > 0

    def kinds(self, part: Part, name: str) -> tuple[Kind, ...]:
        """The passing faults that mean something there."""
        if part is Part.API:
            return _LISTING_KINDS
        kinds = tuple(kind for kind in _FILE_KINDS if self.refusals or kind is not Kind.REDIRECT_LOOP)
        if part is Part.CDN:
            kinds += (Kind.EXPIRE,)
        if self.has_body(part, name):
            kinds += _BODY_KINDS + (_RESUMED_KINDS if self.sizes[name] > 1 else ())
        elif part is Part.HUB:
            kinds += (Kind.ETAG,)
        return kinds

    def fault(self, kind: Kind, part: Part, name: str) -> Fault:
        """A fault of that kind with its numbers."""
        choice = self.random.choice
        if kind in (Kind.STALL, Kind.STALL_HEADERS):
            at = self.position(name) if kind is Kind.STALL else 0
            return Fault(kind, at=at, seconds=choice(self.stall_seconds))
        if kind is Kind.STATUS:
            return self._status(part)
        if kind in (Kind.LENGTH_SHORT, Kind.LENGTH_LONG, Kind.RANGE_TOTAL, Kind.SURPLUS):
            return Fault(kind, at=choice((1, 7, 4096)))
        if kind is Kind.RANGE_START:
            return Fault(kind, at=choice((-1, 1, -4096, 4096)))
        at = self.position(name) if self.has_body(part, name) else 0
        return Fault(kind, at=at, reset=kind is Kind.CUT and choice((False, False, True)))

    def position(self, name: str, low: int = 0) -> int:
        """A byte of the file, its ends more often than others."""
        last = self.sizes[name] - 1
        return self.random.choice((low, last, *(self.random.randint(low, last) for _ in range(3))))

    def _status(self, part: Part) -> Fault:
        refuse = self.refusals and self.random.random() < 0.2
        status = self.random.choice((_REFUSING_STATUSES if refuse else _PASSING_STATUSES)[part])
        if status in _WAITING_STATUSES:
            seconds = self.random.choice(self.retry_after_seconds)
            return Fault(Kind.STATUS, status=status, seconds=seconds, as_date=self.random.random() < 0.5)
        return Fault(Kind.STATUS, status=status)


def lasting_faults(dice: Dice, n_faults: int) -> tuple[Planned, ...]:
    """Faults that never end, each on another file, from its first request on.

    Raises:
        ValueError: There are not so many files.
    """
    if n_faults > len(dice.sizes):
        raise ValueError(f"{n_faults} permanent faults on {len(dice.sizes)} files")
    found: dict[str, Planned] = {}
    while len(found) < n_faults:
        part, name = dice.place(listings=False)
        kinds = [kind for kind in _LASTING_KINDS if kind is not Kind.FLIP or dice.has_body(part, name)]
        fault = dice.fault(dice.random.choice(kinds), part, name)
        found.setdefault(name, Planned(part, name, fault, 0, None))
    return tuple(found.values())


def passing_faults(dice: Dice, n_tries: int, n_per_file: int, excluded: Collection[str | None]) -> Iterator[Planned]:
    """Faults of single requests on the files that are not excluded, mostly of requests that follow each other."""
    next_index: dict[tuple[Part, str], int] = {}
    n_planned: dict[tuple[Part, str], int] = {}
    flipped: set[str] = set()
    for _ in range(n_tries):
        key = part, name = dice.place(listings=True)
        kind = dice.random.choice(dice.kinds(part, name))
        needs_resume = kind in _RESUMED_KINDS and dice.has_body(part, name)
        n_needed = 2 if needs_resume else 1
        if name in excluded or n_planned.get(key, 0) + n_needed > n_per_file or (kind is Kind.FLIP and name in flipped):
            continue
        index = next_index.get(key, 0) + dice.random.choice((0, 0, 1))
        if needs_resume:
            yield Planned(part, name, Fault(Kind.CUT, at=dice.position(name, low=1)), index)
        if kind is Kind.FLIP:
            flipped.add(name)
        yield Planned(part, name, dice.fault(kind, part, name), index + n_needed - 1)
        next_index[key] = index + n_needed
        n_planned[key] = n_planned.get(key, 0) + n_needed
