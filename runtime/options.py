"""What a user may choose about running a container; nothing but `chunk` changes a logit, and that in rounding alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `Engine.open`; defaults stand here alone."""

    context: int = 4096  # positions the latent caches have room for
    budget_bytes: int | None = None  # of all memory of the process; None: a safe share of this machine's
    threads: int | None = None  # that compute; None: the available cores
    readers: int = 4  # threads that read experts
    lookahead: int = 6  # experts of the next layer to read early; 0 turns it off
    chunk: int = 512  # tokens of a prompt that are taken at once; 1: token by token
    verify: bool = False  # check the crc32 of every record on its way into memory
    learn: bool = False  # keep routing counts in usage.waste for the next start
