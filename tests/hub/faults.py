"""When things go wrong: schedules of faults, built by hand or drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.hub.draw import Dice, lasting_faults, passing_faults
from tests.hub.kinds import Fault, Kind, Part, Planned

__all__ = ["Fault", "FaultSchedule", "Kind", "Part", "Planned"]


@dataclass(frozen=True)
class FaultSchedule:
    """The faults of a server; the first that covers a request is the one that happens."""

    planned: tuple[Planned, ...] = ()

    @classmethod
    def random(
        cls,
        seed: int,
        sizes: Mapping[str, int],
        *,
        n_faults: int = 8,
        n_permanent: int = 0,
        n_per_file: int = 3,
        refusals: bool = True,
        stall_seconds: Sequence[float | None] = (0.05, None),
        retry_after_seconds: Sequence[int] = (0, 1),
    ) -> FaultSchedule:
        """A schedule drawn from a seed: equal arguments give equal schedules.

        Args:
            sizes: File name → bytes; LFS files are told by `is_lfs`.
            n_faults: Tries to place a passing fault. One that needs a resumed request (another range, another ETag)
                brings the cut before it along.
            n_permanent: Faults that never end and let nobody succeed, each on a file of its own that has no others.
            n_per_file: At most so many passing faults on one file in one part, and at most one FLIP per file.
            refusals: Whether passing faults may be discouraging ones.
            stall_seconds: What stalls last; None: until the client goes away.
            retry_after_seconds: What 429 and 503 may ask for.

        Raises:
            ValueError: More permanent faults than files.
        """
        dice = Dice(random.Random(seed), sizes, refusals, stall_seconds, retry_after_seconds)
        lasting = lasting_faults(dice, n_permanent)
        return cls((*lasting, *passing_faults(dice, n_faults, n_per_file, {one.name for one in lasting})))

    @property
    def permanent(self) -> tuple[Planned, ...]:
        """Those that never end."""
        return tuple(one for one in self.planned if one.permanent)

    @property
    def final(self) -> tuple[Planned, ...]:
        """Those that make success impossible for whoever needs their file."""
        return tuple(one for one in self.planned if one.final)

    @property
    def discouraging(self) -> tuple[Planned, ...]:
        """Those at which giving up is right, too. Empty: a client with patience must succeed."""
        return tuple(one for one in self.planned if one.discouraging)

    def fault_for(self, part: Part, name: str, n_before: int, n_part_before: int) -> Fault | None:
        """The fault of one request, or None; see Planned.covers."""
        hits = (one.fault for one in self.planned if one.covers(part, name, n_before, n_part_before))
        return next(hits, None)
