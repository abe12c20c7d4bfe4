"""Where experts come from: one record, one read.

The models ask for experts only through `ExpertStore.fetch`, so a memory budget, a cache and read-ahead go here
and nowhere else; they decide when a record is read, never what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from container.reader import ContainerReader
from container.records import ExpertRecord


@dataclass
class StoreCounters:
    """What a store has done since it was opened."""

    n_reads: int = 0
    read_bytes: int = 0


class ExpertStore:
    """Expert records of an opened container, read when asked for. With `verify` each record's crc32 is checked."""

    def __init__(self, reader: ContainerReader, *, verify: bool = False) -> None:
        self._reader = reader
        self._verify = verify
        self.counters = StoreCounters()

    def fetch(self, layer: int, expert: int) -> ExpertRecord:
        """The record of one expert. Raises FormatError for a bad record, IntegrityError for a wrong crc32."""
        record = self._reader.read_expert(layer, expert, check_crc=self._verify)
        self.counters.n_reads += 1
        self.counters.read_bytes += self._reader.layout.stride_bytes
        return record
