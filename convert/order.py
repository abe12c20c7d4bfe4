"""In which order jobs run when shards come and go, and what room that takes: pure decisions over names and sizes.

A shard is held from when it is first needed (or lay there at the beginning) until its last consumer is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """The shards that every unfinished job reads, and the sizes of all of them in bytes."""

    shards: Mapping[str, frozenset[str]]  # job id → shard names
    sizes: Mapping[str, int]

    @property
    def all_shards(self) -> frozenset[str]:
        """Every shard that some job reads."""
        return frozenset().union(*self.shards.values())

    def n_bytes(self, shards: Set[str]) -> int:
        """Size of several shards together."""
        return sum(self.sizes[shard] for shard in shards)


def job_order(needs: Needs, wanted: Sequence[str], held: Set[str]) -> list[str]:
    """The `wanted` jobs in the order that asks for few shards at once.

    Jobs whose shards are all held come first, then those that share a shard with what is held (so that it can go),
    then the first in `wanted`.
    """
    held, left, order = set(held), list(wanted), []
    while left:
        job = min(left, key=lambda job: (not needs.shards[job] <= held, needs.shards[job].isdisjoint(held)))
        left.remove(job)
        order.append(job)
        held |= needs.shards[job]  # what nobody needs any more does no harm in it
    return order


def held_after(needs: Needs, order: Sequence[str], held: Set[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Each job of `order` with the shards that must be in one place while it runs, when jobs run one by one."""
    now, done = set(held), set[str]()
    now -= _unneeded(now, needs, done)
    for job in order:
        now |= needs.shards[job]
        yield job, frozenset(now)
        done.add(job)
        now -= _unneeded(now, needs, done)


def least_staging(needs: Needs, order: Sequence[str], held: Set[str]) -> tuple[int, str]:
    """(bytes, job): the room without which `order` cannot be worked through, and the job that needs it."""
    each = [(needs.n_bytes(shards), job) for job, shards in held_after(needs, order, held)]
    return max(each, key=lambda found: found[0], default=(0, ""))


def shard_order(needs: Needs, order: Sequence[str]) -> list[str]:
    """Every shard once, in the order in which jobs ask for it."""
    return list(dict.fromkeys(shard for job in order for shard in sorted(needs.shards[job])))


def output_growth(
    needs: Needs, order: Sequence[str], held: Set[str], written: Mapping[str, int], n_workers: int
) -> int:
    """About the most by which a disk fills that holds source and output, while shards are given back; in bytes.

    `written`: what each job adds. With several workers a shard may still be held while the outputs of as many jobs
    are being written; jobs are taken to end in the order in which they began.
    """
    present, growth, most = set(held), 0, 0
    done: set[str] = set()
    for number, job in enumerate(order):
        growth += written[job]
        most = max(most, growth)
        if number >= n_workers - 1:
            done.add(order[number - n_workers + 1])
            gone = _unneeded(present, needs, done)
            growth -= needs.n_bytes(gone)
            present -= gone
    return most


def _unneeded(held: Set[str], needs: Needs, done: Set[str]) -> set[str]:
    """Shards that no unfinished job needs."""
    return set(held) - {shard for job, shards in needs.shards.items() if job not in done for shard in shards}
