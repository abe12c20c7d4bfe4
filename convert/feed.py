"""Which job may start: one whose shards are here. And which shards may go: those of which no job is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from convert.order import Needs
from convert.supply import Supply


class ShardFeed:
    """Feeds the pool with jobs as their shards come, and tells the supply which shards nobody needs any more."""

    def __init__(self, supply: Supply, needs: Needs, order: Sequence[str], numbers: Mapping[str, int]) -> None:
        """`needs` of all unfinished jobs; `order`: ids of those of this run; `numbers`: their numbers in the pool."""
        self._supply = supply
        self._needs = needs
        self._numbers = numbers
        self._waiting = list(order)
        self._ids = {number: job for job, number in numbers.items()}
        self._running: set[int] = set()
        self._unfinished = dict(needs.shards)

    def take(self) -> int | None:
        """The first job whose shards are all here. Raises what ended the supply once nothing runs any more."""
        for job in self._waiting:
            if all(map(self._supply.here, self._needs.shards[job])):
                self._waiting.remove(job)
                self._running.add(self._numbers[job])
                return self._numbers[job]
        failure = self._supply.failure()
        if failure is not None and self._waiting and not self._running:
            raise failure
        return None

    def finished(self, number: int) -> None:
        """A job is done and its output safe: give back what it was the last to need."""
        self._running.discard(number)
        shards = self._unfinished.pop(self._ids[number])
        for shard in sorted(shards - Needs(self._unfinished, self._needs.sizes).all_shards):
            self._supply.give_back(shard)
