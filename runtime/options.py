"""What a user may choose about running a container; nothing but `chunk` changes a logit, and that in rounding alone."""

from __future__ import annotations

from dataclasses import dataclass

from container.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `Engine.open`; defaults stand here alone. Raises UsageError for values that make no sense."""

    context: int = 4096  # positions the latent caches have room for
    budget_bytes: int | None = None  # of all memory of the process; None: a safe share of this machine's
    threads: int | None = None  # that compute; None: the available cores
    readers: int = 4  # threads that read experts
    lookahead: int = 6  # experts of the next layer to read early; 0 turns it off
    chunk: int = 512  # tokens of a prompt that are taken at once; 1: token by token
    verify: bool = False  # check the crc32 of every record on its way into memory
    learn: bool = False  # keep routing counts in usage.waste for the next start

    def __post_init__(self) -> None:
        for name, least in (("context", 1), ("threads", 1), ("readers", 1), ("lookahead", 0), ("chunk", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} must be a whole number of at least {least}, found {value}")
