"""The slots of the expert cache against a model that is a dictionary."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.disk.cache import SlotState, SlotTable
from runtime.disk.eviction import EvictionPolicy

N_EXPERTS = 6


class Slots(RuleBasedStateMachine):
    """Any order of calls: never more keys than slots, and nothing that is pinned or on its way is ever lost."""

    @initialize(n_slots=st.integers(1, 5))
    def begin(self, n_slots: int) -> None:
        self.policy = EvictionPolicy((0, 1), N_EXPERTS)
        self.table = SlotTable(n_slots, self.policy)
        self.held: dict[int, int] = {}  # key → slot
        self.loading: set[int] = set()
        self.pins: Counter[int] = Counter()  # slot → pins

    @rule(layer=st.integers(0, 1), expert=st.integers(0, N_EXPERTS - 1), evict=st.booleans())
    def take(self, layer: int, expert: int, evict: bool) -> None:
        key = self.policy.key(layer, expert)
        self.policy.use(layer, [expert])
        if key in self.held:
            assert self.table.find(key) == self.held[key]
            return
        blocked = {slot for slot in range(self.table.n_slots) if self.pins[slot] or slot in self.loading}
        n_before, n_free = len(self.held), self.table.n_free
        slot = self.table.take(key, evict=evict)
        if slot is None:
            assert not n_free
            assert not evict or len(blocked) == self.table.n_slots
            return
        assert slot not in blocked
        self.held = {other: where for other, where in self.held.items() if where != slot} | {key: slot}
        assert len(self.held) == n_before + bool(n_free)  # none is evicted while there is room
        self.loading.add(slot)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data: st.DataObject, good: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.remove(slot)
        if good:
            self.table.loaded(slot)
        else:
            self.table.failed(slot)
            self.held = {key: where for key, where in self.held.items() if where != slot}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held.values())))
        self.table.pin(slot)
        self.pins[slot] += 1

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(+self.pins)))
        self.table.unpin(slot)
        self.pins[slot] -= 1

    @rule()
    def forget(self) -> None:
        emptied = self.table.forget()
        gone = {slot for slot in self.held.values() if slot not in self.loading and not self.pins[slot]}
        assert set(emptied) == gone
        self.held = {key: slot for key, slot in self.held.items() if slot not in gone}

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        found = {key: self.table.find(key) for key in range(2 * N_EXPERTS)}
        assert {key: slot for key, slot in found.items() if slot is not None} == self.held
        assert len(set(self.held.values())) == len(self.held)
        for slot in self.held.values():
            assert self.table.state(slot) is (SlotState.LOADING if slot in self.loading else SlotState.READY)
        failed = {slot for slot in +self.pins if slot not in self.held.values()}
        assert self.table.n_free == self.table.n_slots - len(self.held) - len(failed)


Slots.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestSlots = Slots.TestCase
