"""Sizes as people write them on a command line."""

from __future__ import annotations

import re

from container.errors import UsageError, shown

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?([KMGT]?)(i?)B?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, option: str) -> int:
    """Bytes of a size like 60GB (10⁹), 500MB or 55GiB (2³⁰), given with `option`. Raises UsageError."""
    found = _SIZE.fullmatch(text.strip())
    if not found or (found[3] and not found[2]):
        raise UsageError(f"{option} must be a size like 60GB, found {shown(text)}")
    power = " KMGT".index(found[2].upper() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
