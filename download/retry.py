"""When to ask again and how long to wait: decisions without a clock, a socket or a sleep.

Delays are exponential with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015):
uniform between nothing and a bound that doubles with each failure. Retry-After is read as RFC 9110, 10.2.3 has it.
"""

from __future__ import annotations

import datetime
import email.utils
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

# What a stalled line must bring on average, or it is cut.
LEAST_BYTES_PER_SECOND = 1024

# Of the 4xx; 416 says that our bytes do not fit, and whoever asked begins anew.
_AGAIN = {408, 416, 425, 429}
# What storage says of a signed URL that has expired; S3 says 400 where the key behind the signature has.
_EXPIRED = {400, 401, 403}
_LONGEST_MESSAGE = 300


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for what, in seconds."""

    base_seconds: float = 1.0  # bound of the first delay
    longest_seconds: float = 60.0  # bound of every delay that we choose
    longest_asked_seconds: float = 900.0  # and of those that a server asks for
    give_up_seconds: float = 3600.0  # without one new byte
    connect_seconds: float = 15.0
    stall_seconds: float = 60.0  # a line that brings next to nothing for so long is cut


class Step(Enum):
    """What to do after an answer."""

    GO_ON = auto()
    RETRY = auto()
    RENEW = auto()  # the signed URL has expired: ask the hub for another
    REFUSE = auto()


@dataclass(frozen=True)
class Verdict:
    """What to do after an answer, and why unless it is good."""

    step: Step
    reason: str = ""


def delay_seconds(failures: int, patience: Patience, rng: random.Random) -> float:
    """How long to wait after so many failures (1 or more) in a row."""
    bound = patience.base_seconds * 2.0 ** min(failures - 1, 64)
    return rng.uniform(0, min(bound, patience.longest_seconds))


def retry_after_seconds(value: str | None, now: datetime.datetime, patience: Patience) -> float:
    """What a Retry-After header asks for, seconds or a date, within bounds; 0 where it is absent or makes no sense.

    `now` carries a time zone.
    """
    text = (value or "").strip()
    if text.isascii() and text.isdigit():
        asked = float(text)
    else:
        try:
            date = email.utils.parsedate_to_datetime(text)
        except ValueError:
            return 0.0
        if date.tzinfo is None:
            date = date.replace(tzinfo=datetime.UTC)
        asked = (date - now).total_seconds()
    return min(max(asked, 0.0), patience.longest_asked_seconds)


def judge(status: int, *, redirected: bool, headers: Mapping[str, str]) -> Verdict:
    """What an answer's status means; `redirected`: it came from where the hub sent us. `headers` ignore case."""
    if status in {200, 206}:
        return Verdict(Step.GO_ON)
    said = _said(status, headers)
    if redirected and status in _EXPIRED and "X-Error-Code" not in headers:
        return Verdict(Step.RENEW, f"{said}: the signed URL has expired")
    if status in _AGAIN or not 400 <= status < 500:
        return Verdict(Step.RETRY, said)
    return Verdict(Step.REFUSE, f"{said}: {_advice(status, headers.get('X-Error-Code', ''))}")


def _said(status: int, headers: Mapping[str, str]) -> str:
    code, message = headers.get("X-Error-Code"), headers.get("X-Error-Message")
    details = ", ".join(detail[:_LONGEST_MESSAGE] for detail in (code, message) if detail)
    return f"HTTP {status} ({details})" if details else f"HTTP {status}"


def _advice(status: int, code: str) -> str:
    """What a person can do about a refusal."""
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    if code == "GatedRepo":
        return f"the repository is gated; accept its conditions on its page, then {log_in}"
    if code == "RepoNotFound":
        return f"no such repository, or it is private; look at its name, or {log_in}"
    if code == "RevisionNotFound":
        return "no such revision; look at its name"
    if code == "EntryNotFound":
        return "the repository has no such file at this revision; run the command again to list it anew"
    if status == 401:
        return f"the hub does not know who is asking; {log_in}"
    if status == 403:
        return f"the hub does not let you read this; {log_in} with an account that may"
    if status in {404, 410}:
        return "there is no such file any more; run the command again to list the repository anew"
    return "asking again would not help"
