"""What an expert store counts."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(kw_only=True)
class Statistics:
    """What a store has done since it was opened. The difference of two is what happened between."""

    n_hits: int = 0  # experts that were in memory when they were asked for
    n_misses: int = 0  # experts that were not
    n_late: int = 0  # misses that lookahead or the warm start was just reading
    demand_reads: int = 0
    demand_bytes: int = 0
    ahead_reads: int = 0  # by lookahead
    ahead_bytes: int = 0
    ahead_used: int = 0  # reads by lookahead whose expert was asked for before it was evicted
    ahead_dropped: int = 0  # experts that lookahead wanted and that were not read
    warm_reads: int = 0
    warm_bytes: int = 0
    wait_seconds: float = 0.0  # that the computing thread waited for records
    busy_seconds: float = 0.0  # during which at least one read was under way

    @property
    def n_reads(self) -> int:
        """Records read, for whatever cause."""
        return self.demand_reads + self.ahead_reads + self.warm_reads

    @property
    def read_bytes(self) -> int:
        """Bytes of all reads."""
        return self.demand_bytes + self.ahead_bytes + self.warm_bytes

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that were in memory; 0 when none was asked for."""
        return self.n_hits / max(self.n_hits + self.n_misses, 1)

    @property
    def read_gb_per_second(self) -> float:
        """10⁹ bytes per second while reading; 0 when nothing was read."""
        return self.read_bytes / self.busy_seconds / 1e9 if self.busy_seconds > 0 else 0.0

    def __sub__(self, earlier: Statistics) -> Statistics:
        return Statistics(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
