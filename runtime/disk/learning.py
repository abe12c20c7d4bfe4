"""What former runs counted, and handing on what this one counts: usage.waste between a container and the cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from container.errors import FormatError
from container.layout import USAGE_NAME
from container.usage import Usage, read_usage, write_usage
from runtime.disk.direct import Notice
from runtime.disk.eviction import EvictionPolicy


def learnt(folder: Path, policy: EvictionPolicy, notice: Notice) -> Usage:
    """The counts in `folder`, given to `policy` too. A file of no use is ignored, with a line to `notice`."""
    none = np.zeros((len(policy.layers), policy.n_experts), dtype=np.int64)
    try:
        usage = read_usage(folder, policy.layers, policy.n_experts)
    except FormatError as error:
        notice(f"{error}; ignored, the expert cache starts empty")
        usage = None
    usage = usage or Usage(policy.layers, 0, none, none)
    policy.learn(usage.hits.reshape(-1), usage.n_tokens)
    return usage


def hand_on(folder: Path, policy: EvictionPolicy, before: Usage, notice: Notice) -> None:
    """Publish the counts `before` and those of `policy` together; a file that cannot be written is a line to `notice`.

    Nothing is written when no token passed.
    """
    if not policy.n_tokens:
        return
    uses, seen = (counts.reshape(before.hits.shape) for counts in policy.counted())
    usage = Usage(
        policy.layers,
        before.n_tokens + policy.n_tokens,
        before.hits + uses,
        np.where(uses > 0, before.n_tokens + seen, before.last_seen),
    )
    try:
        write_usage(folder, usage)
    except OSError as error:
        notice(f"{folder / USAGE_NAME}: cannot be written ({error.strerror}); what this run learnt is lost")
