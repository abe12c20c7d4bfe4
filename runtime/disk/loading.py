"""From disk into slots: the bytes behind a slot table, and the reads that fill them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from container.errors import FormatError
from container.reader import ContainerReader
from container.records import ExpertRecord
from runtime.disk.books import Books
from runtime.disk.cache import SlotTable
from runtime.disk.direct import DirectFiles, arena
from runtime.disk.eviction import EvictionPolicy
from runtime.disk.readers import Cause, Load, Readers
from runtime.disk.tally import Statistics

Expert = tuple[int, int]  # layer, expert


class SlotLoader:
    """Slots of one record each, and threads that read into them. All methods but `close` are for holders of `lock`, and
    those that change anything are called within the `books` that the user of this object gives.

    A slot that is not pinned may be given to another expert by any `start`.
    """

    def __init__(
        self,
        reader: ContainerReader,
        files: DirectFiles,
        policy: EvictionPolicy,
        books: Books,
        *,
        n_slots: int,
        n_readers: int,
        verify: bool,
        warm: Sequence[Expert],
    ) -> None:
        """`warm`: experts to read when there is nothing else to do, into slots that are free, the first one first."""
        self.lock = threading.Lock()
        self.table = SlotTable(n_slots, policy)
        self.counts = Statistics()
        self._reader, self._files, self._policy = reader, files, policy
        self._layout, self._stride_bytes = reader.layout, reader.layout.stride_bytes
        self._verify = verify
        self._memory = arena(n_slots * self._stride_bytes)
        self._records: list[ExpertRecord | None] = [None] * n_slots
        self._loads: dict[int, Load] = {}  # slot → its load, until that is done or cancelled
        self._unused: set[int] = set()  # slots filled by lookahead and not asked for yet
        self._warm = list(reversed(warm))
        self.readers = Readers(n_readers, self.lock, books, read=self._read, done=self._loaded, idle=self._next_warm)

    def record(self, slot: int) -> ExpertRecord:
        """The record in a slot that is ready."""
        found = self._records[slot]
        if found is None:
            raise ValueError(f"slot {slot} holds no record")
        return found

    def pending(self, slot: int) -> Load | None:
        """The load that is filling `slot`, or None."""
        return self._loads.get(slot)

    def start(self, layer: int, expert: int, cause: Cause) -> Load | None:
        """Have an expert read that no slot holds; None when there is no slot to be had for this cause.

        A demand takes the slot of the least promising read that has not begun, if it must.
        """
        key = self._policy.key(layer, expert)
        slot = self.table.take(key, evict=cause is not Cause.WARM)
        if slot is None and cause is Cause.DEMAND and self._drop_one():
            slot = self.table.take(key)
        if slot is None:
            return None
        self._records[slot] = None
        self._unused.discard(slot)
        load = self._loads[slot] = Load(layer, expert, slot, cause)
        if cause is not Cause.WARM:  # a thread that has nothing else to do takes that one itself
            self.readers.submit(load)
        return load

    def demanded(self, slot: int) -> None:
        """Somebody asks for what `slot` holds or will hold: it is read first, if it is still to be read."""
        load = self._loads.get(slot)
        if load is not None:
            self.readers.hurry(load, Cause.DEMAND)
            if load.cause is Cause.AHEAD and not load.is_used:
                self.counts.ahead_used += 1
            load.is_used = True
        elif slot in self._unused:
            self._unused.discard(slot)
            self.counts.ahead_used += 1

    def cancel(self, load: Load) -> bool:
        """Give up a read, and its slot; False when it has begun."""
        if not self.readers.cancel(load):
            return False
        if load.cause is Cause.AHEAD:
            self.counts.ahead_dropped += 1
        del self._loads[load.slot]
        self.table.failed(load.slot)
        return True

    def drop_ahead(self, layer: int, wanted: Sequence[int]) -> None:
        """Give up reads by lookahead for `layer` that are not `wanted` after all and have not begun."""
        for load in list(self._loads.values()):
            if load.cause is Cause.AHEAD and load.layer == layer and load.expert not in wanted:
                self.cancel(load)

    def forget(self) -> None:
        """Empty every slot that is ready and not pinned."""
        for slot in self.table.forget():
            self._records[slot] = None
            self._unused.discard(slot)

    def restore(self) -> None:
        """Empty every slot, after an interrupt has left things half done; reads under way go on."""
        self.readers.drop_queue()
        under_way = self.readers.under_way
        self._loads = {load.slot: load for load in under_way}
        self.table.clear((load.slot, self._policy.key(load.layer, load.expert)) for load in under_way)
        self._records = [None] * self.table.n_slots
        self._unused.clear()

    def close(self) -> None:
        """End the threads."""
        self.readers.close()

    def _drop_one(self) -> bool:
        """Give up the read that came last of those that wait and that nobody asked for."""
        waiting = (load for load in reversed(self._loads.values()) if load.cause is not Cause.DEMAND)
        return any(self.cancel(load) for load in waiting)

    def _read(self, load: Load) -> ExpertRecord:
        """Read one record; a reading thread does this, without the lock."""
        bank = self._reader.bank(load.layer)
        view = self._memory[load.slot * self._stride_bytes :][: self._stride_bytes]
        try:
            self._files.read_aligned(bank.file, view, load.expert * self._stride_bytes)
        except FormatError as error:
            raise FormatError(f"layer {load.layer} expert {load.expert}: {error}") from None
        return ExpertRecord.unpack(
            view,
            self._layout,
            layer=load.layer,
            expert=load.expert,
            codebook_base=bank.codebook_base,
            check_crc=self._verify,
            source=str(self._files.folder / bank.file),
        )

    def _loaded(self, load: Load) -> None:
        del self._loads[load.slot]
        if load.record is None:
            self.table.failed(load.slot)
            return
        self._records[load.slot] = load.record
        self.table.loaded(load.slot)
        if load.cause is Cause.DEMAND:
            self.counts.demand_reads += 1
            self.counts.demand_bytes += self._stride_bytes
        elif load.cause is Cause.AHEAD:
            self.counts.ahead_reads += 1
            self.counts.ahead_bytes += self._stride_bytes
            if not load.is_used:
                self._unused.add(load.slot)
        else:
            self.counts.warm_reads += 1
            self.counts.warm_bytes += self._stride_bytes

    def _next_warm(self) -> Load | None:
        while self._warm and self.table.n_free:
            layer, expert = self._warm.pop()
            if self.table.find(self._policy.key(layer, expert)) is None:
                return self.start(layer, expert, Cause.WARM)
        self._warm.clear()
        return None
