"""A checkpoint folder as a conversion's supply: every shard is here; with `--reclaim on` they go one by one."""

from __future__ import annotations

import os
from collections.abc import Mapping

from container.checkpoint import Checkpoint
from container.errors import SourceError, shown
from container.fingerprint import ShardFingerprint
from container.machine import free_disk, same_disk
from container.progress import size
from convert.options import ConvertOptions, Reclaim
from convert.order import Needs, job_order
from convert.provenance import origin_of
from download.folder import SourceFolder
from download.give_back import files_of, give_back
from download.headers import keep_headers_here, kept_headers
from download.ledger import Ledger

SHOWN_JOBS = 3


class LocalSupply:
    """A checkpoint folder. With `--reclaim on` its shards are deleted one by one as the container grows."""

    def __init__(self, options: ConvertOptions) -> None:
        self._options = options
        self._folder = SourceFolder(options.source)
        self._ledger = Ledger(self._folder.ledger)
        gone = [shard for shard in self._ledger.reclaimed if not self._folder.file(shard).exists()]
        self.checkpoint = Checkpoint.open(options.source, kept_headers(self._folder, self._ledger, gone))
        self.origin = origin_of(options.source, self._ledger)
        self.gives_back = options.reclaim is Reclaim.ON
        self.fetches = False
        self._news: list[str] = []
        self._to_stay: set[str] = set()  # shards that are not given back yet

    @property
    def fingerprints(self) -> Mapping[str, ShardFingerprint]:
        """As the ledger has them, of shards that are gone: those that are here speak for themselves."""
        return {shard: found for shard, found in self._ledger.sampled.items() if not self.here(shard)}

    @property
    def shard_bytes(self) -> Mapping[str, int]:
        """Of the shards that are here, and of those that the ledger knows."""
        known = {shard: found.n_bytes for shard, found in self._ledger.sampled.items()}
        return known | {shard: self._folder.file(shard).stat().st_size for shard in self.held}

    @property
    def held(self) -> frozenset[str]:
        """The shards that are here."""
        return frozenset(filter(self.here, self.checkpoint.shard_names))

    def here(self, shard: str) -> bool:
        """True when the shard is in the folder."""
        return self.checkpoint.has_shard(shard)

    def problems(self, needs: Needs) -> list[str]:
        """Shards that are missing, gone or not proved; with --reclaim, what must not be deleted."""
        problems = []
        for shard in self.checkpoint.shard_names:
            path, needed_by = self._folder.file(shard), _jobs(needs, shard)
            if self.here(shard):
                problems += self._unproved(shard) if needed_by else []
            elif shard not in self._ledger.reclaimed or shard not in self._ledger.sampled:
                problems.append(f"shard {path}: missing; download it")
            elif needed_by:
                problems.append(f"shard {path}: {self._needed_again(shard, needed_by)}")
        if self._options.reclaim is not Reclaim.OFF:
            problems += self._not_deletable()
        return problems

    def _needed_again(self, shard: str, needed_by: str) -> str:
        into, output = self._ledger.reclaimed[shard].into, str(self._options.output.resolve())
        what = f"was given back when all that is made of it was safe in {into}, but "
        if into == output:
            what += f"{needed_by} must be converted again: what is there does not hold, or is gone"
        else:
            what += f"this run needs it for {needed_by}; name that folder as OUT"
        return f"{what}{'. To' if into == output else ', or'} get the shard back run `{self._download(shard)}`"

    def _unproved(self, shard: str) -> list[str]:
        """Where a download keeps a ledger, a shard without a proof may be anything."""
        if not self._ledger.demands_proofs:
            return []
        path, proof = self._folder.file(shard), self._ledger.proved.get(shard)
        if proof is None:
            what = "was not proved by the download that keeps this folder's ledger"
        elif proof.n_bytes != path.stat().st_size:
            what = f"has {path.stat().st_size} bytes, {proof.n_bytes} were proved"
        else:
            return []
        return [f"shard {path}: {what}; run `{self._download(shard)}`"]

    def _download(self, shard: str) -> str:
        """The command that gets a shard, or proves it; but not those again that were given back."""
        origin = self._ledger.origin or self.origin
        command = f"python -m download {origin.repository or 'REPO'} {self._folder.folder}"
        if origin.revision:
            command += f" --revision {origin.revision}"
        return f"{command} --include {shard}" if self._ledger.reclaimed else command

    def _not_deletable(self) -> list[str]:
        problems = []
        for shard in self.checkpoint.shard_names:
            path = self._folder.file(shard)
            if not (self.here(shard) or path.is_symlink()):
                continue  # it is gone, or missing: said elsewhere
            try:
                files = files_of(path)
                unread = self._unread(shard)
            except SourceError as error:
                problems.append(str(error))
                continue
            if unread:
                problems.append(
                    f"{path}: holds {shown(unread)}, which the index does not name, so nobody would read it"
                )
            if not all(os.access(file.parent, os.W_OK | os.X_OK) for file in files):
                problems.append(f"{path}: in a read-only folder, so --reclaim cannot delete it")
        return problems

    def _unread(self, shard: str) -> str | None:
        """A tensor of the shard that the index does not look for in it. Raises ShardError."""
        if not self.here(shard):
            return None
        tensors, weight_map = self.checkpoint.shard(shard).tensors, self.checkpoint.weight_map
        return next((name for name in sorted(tensors) if weight_map.get(name) != shard), None)

    def most_jobs(self, needs: Needs) -> int | None:
        """All: their shards are here."""
        return None

    def room(self, needs: Needs, missing_bytes: int, growth_bytes: int) -> int:
        """Less than all of the container, where deleted shards make room for it."""
        places = {self._folder.file(shard).resolve().parent for shard in self.held}
        if self.gives_back and all(same_disk(place, self._options.output) for place in places):
            return min(missing_bytes, growth_bytes)
        return missing_bytes

    def begin(self, needs: Needs, wanted: list[str]) -> list[str]:
        """Keep what must be known of shards that go; finish giving back what an earlier run was killed at."""
        if self.gives_back:
            keep_headers_here(self._folder, self._ledger, self.checkpoint)
        needed = needs.all_shards
        for shard in self.checkpoint.shard_names:
            if shard not in needed and (self.here(shard) or self._folder.file(shard).is_symlink()):
                self.give_back(shard)
        self._to_stay = set(self.held)
        return job_order(needs, wanted, self.held)

    def give_back(self, shard: str) -> None:
        """Delete the shard, or say that it would be."""
        self._to_stay.discard(shard)
        if self._options.reclaim is Reclaim.ON:
            n_bytes = give_back(self._folder, self._ledger, shard, self._options.output)
            self._news.append(f"gave back {shard}: {size(n_bytes)}, {size(free_disk(self._folder.folder))} free now")
        elif self._options.reclaim is Reclaim.DRY:
            self._news.append(f"would give back {shard}: {size(self.shard_bytes[shard])}")

    def notes(self, needs: Needs) -> list[str]:
        """None: problems say it."""
        return []

    def failure(self) -> Exception | None:
        """Shards that somebody took away while the conversion ran: no more will come."""
        lost = sorted(shard for shard in self._to_stay if not self.here(shard))
        if not lost:
            return None
        return SourceError(
            f"shard {self._folder.file(lost[0])}: was here when the conversion began and is gone now"
            f"{f', and {len(lost) - 1} more' if lost[1:] else ''}; put it back and run the same command to continue"
        )

    def news(self) -> list[str]:
        """What was given back."""
        said, self._news = self._news, []
        return said


def _jobs(needs: Needs, shard: str) -> str:
    """The jobs that read a shard, in words; empty when there is none."""
    jobs = [job for job, shards in needs.shards.items() if shard in shards]
    more = f" and {len(jobs) - SHOWN_JOBS} more" if len(jobs) > SHOWN_JOBS else ""
    return ", ".join(jobs[:SHOWN_JOBS]) + more
