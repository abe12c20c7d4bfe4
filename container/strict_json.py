"""JSON read strictly, and written in one way.

Files we do not trust must hold one object, read the way a strict parser in any language would read it. Python's
parser is lax where others are not: it takes the last of two equal keys, NaN and Infinity, 1e999 as infinity, and lone
surrogates that no file name and no UTF-8 file can hold. Two readers must never see two meanings.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data` (UTF-8). Raises ValueError, saying what is wrong, for anything else."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("objects or lists are nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"must hold an object, found {type(value).__name__}")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def json_bytes(value: Any) -> bytes:
    """The bytes of a JSON file of ours: UTF-8, keys in the order given, so that equal values give equal bytes."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"
