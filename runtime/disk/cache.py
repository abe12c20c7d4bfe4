"""Slots that hold expert records: which expert lies where, and what may be given up for another.

No memory and no reading here: a slot is a number. The store gives slots their bytes; the simulation of a routing
trace needs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum, unique

import numpy as np

from runtime.disk.eviction import EvictionPolicy


@unique
class SlotState(IntEnum):
    """What a slot holds."""

    FREE = 0
    LOADING = 1
    READY = 2
    FAILED = 3  # nothing, but somebody still has it pinned


class SlotTable:
    """`n_slots` slots. The caller sees to it that one thread at a time is in here."""

    def __init__(self, n_slots: int, policy: EvictionPolicy) -> None:
        self.n_slots = n_slots
        self._policy = policy
        self._slots: dict[int, int] = {}  # key → slot, loading or ready
        self._keys = np.zeros(n_slots, dtype=np.int64)
        self._states = [SlotState.FREE] * n_slots
        self._pins = [0] * n_slots
        self._evictable = np.zeros(n_slots, dtype=np.bool_)  # ready and not pinned
        self._free = list(range(n_slots - 1, -1, -1))

    @property
    def n_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def find(self, key: int) -> int | None:
        """The slot that holds `key` or is being filled with it."""
        return self._slots.get(key)

    def state(self, slot: int) -> SlotState:
        """What `slot` holds."""
        return self._states[slot]

    def take(self, key: int, *, evict: bool = True) -> int | None:
        """A slot to fill with `key`, which no slot holds: a free one or, with `evict`, another key's; None if none."""
        if self._free:
            slot = self._free.pop()
        else:
            victim = self._policy.victim(self._keys, self._evictable) if evict else None
            if victim is None:
                return None
            slot = victim
            del self._slots[int(self._keys[slot])]
            self._evictable[slot] = False
        self._slots[key] = slot
        self._keys[slot] = key
        self._states[slot] = SlotState.LOADING
        return slot

    def loaded(self, slot: int) -> None:
        """A loading slot is filled."""
        self._states[slot] = SlotState.READY
        self._evictable[slot] = not self._pins[slot]

    def failed(self, slot: int) -> None:
        """A loading slot will not be filled: its key is forgotten."""
        del self._slots[int(self._keys[slot])]
        self._states[slot] = SlotState.FAILED
        self._release(slot)

    def pin(self, slot: int) -> None:
        """Keep what `slot` holds until it is unpinned as often as it was pinned."""
        self._pins[slot] += 1
        self._evictable[slot] = False

    def unpin(self, slot: int) -> None:
        """Undo one `pin`."""
        self._pins[slot] -= 1
        self._release(slot)

    def forget(self) -> Sequence[int]:
        """Empty all slots that are ready and not pinned; returns them."""
        emptied: list[int] = np.flatnonzero(self._evictable).tolist()
        for slot in emptied:
            del self._slots[int(self._keys[slot])]
            self._states[slot] = SlotState.FREE
        self._evictable[:] = False
        self._free.extend(reversed(emptied))
        return emptied

    def clear(self, loading: Iterable[tuple[int, int]]) -> None:
        """Empty all slots and end all pins, but for (slot, key) that are `loading`. Any state is good to begin with."""
        self._slots = {}
        self._states = [SlotState.FREE] * self.n_slots
        self._pins = [0] * self.n_slots
        self._evictable[:] = False
        for slot, key in loading:
            self._slots[key], self._keys[slot], self._states[slot] = slot, key, SlotState.LOADING
        self._free = [slot for slot in reversed(range(self.n_slots)) if self._states[slot] is SlotState.FREE]

    def _release(self, slot: int) -> None:
        if self._pins[slot]:
            return
        if self._states[slot] is SlotState.FAILED:
            self._states[slot] = SlotState.FREE
            self._free.append(slot)
        self._evictable[slot] = self._states[slot] is SlotState.READY
