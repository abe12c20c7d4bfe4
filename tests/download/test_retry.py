"""When to ask again: golden cases for every kind of answer, properties of the delays."""

from __future__ import annotations

import datetime
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requests.structures import CaseInsensitiveDict

from download.retry import Patience, Step, delay_seconds, judge, retry_after_seconds

NOW = datetime.datetime(2026, 11, 29, 12, 0, 0, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("status", "redirected", "code", "step"),
    [
        (200, False, None, Step.GO_ON),
        (206, True, None, Step.GO_ON),
        (408, False, None, Step.RETRY),
        (425, False, None, Step.RETRY),
        (429, True, None, Step.RETRY),
        (500, False, None, Step.RETRY),
        (502, True, None, Step.RETRY),
        (503, False, None, Step.RETRY),
        (504, True, None, Step.RETRY),
        (599, False, None, Step.RETRY),
        (204, False, None, Step.RETRY),  # no answer to what was asked
        (304, False, None, Step.RETRY),
        (416, True, None, Step.RETRY),
        (400, True, None, Step.RENEW),  # S3, when the key behind a signature has expired
        (401, True, None, Step.RENEW),
        (403, True, None, Step.RENEW),
        (403, True, "GatedRepo", Step.REFUSE),  # a renamed repository: it is the hub that speaks
        (404, True, None, Step.REFUSE),
        (400, False, None, Step.REFUSE),
        (401, False, None, Step.REFUSE),
        (403, False, "GatedRepo", Step.REFUSE),
        (404, False, "EntryNotFound", Step.REFUSE),
        (410, False, None, Step.REFUSE),
        (451, False, None, Step.REFUSE),
    ],
)
def test_every_status_has_its_step(status: int, redirected: bool, code: str | None, step: Step) -> None:
    headers = CaseInsensitiveDict({"x-error-code": code} if code else {})
    verdict = judge(status, redirected=redirected, headers=headers)
    assert verdict.step is step
    assert (f"HTTP {status}" in verdict.reason) == (step is not Step.GO_ON)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "GatedRepo", "accept its conditions"),
        (401, "RepoNotFound", "look at its name"),
        (404, "RevisionNotFound", "no such revision"),
        (404, "EntryNotFound", "no such file"),
        (401, None, "hf auth login"),
        (403, None, "HF_TOKEN"),
        (404, None, "run the command again"),
        (451, None, "would not help"),
    ],
)
def test_a_refusal_says_what_to_do(status: int, code: str | None, words: str) -> None:
    headers = CaseInsensitiveDict({"X-Error-Code": code, "X-Error-Message": "said the hub"} if code else {})
    reason = judge(status, redirected=False, headers=headers).reason
    assert words in reason
    assert ("said the hub" in reason) == (code is not None)


def test_a_long_message_of_a_server_is_cut() -> None:
    headers = CaseInsensitiveDict({"X-Error-Message": "x" * 10_000})
    assert len(judge(500, redirected=False, headers=headers).reason) < 500


@given(st.integers(1, 10_000), st.floats(0.001, 10), st.floats(0.001, 100), st.integers(0, 2**32))
def test_delays_keep_their_bounds(failures: int, base: float, longest: float, seed: int) -> None:
    patience = Patience(base_seconds=base, longest_seconds=longest)
    delay = delay_seconds(failures, patience, random.Random(seed))
    assert 0 <= delay <= longest
    assert failures > 60 or delay <= base * 2 ** (failures - 1)


@pytest.mark.parametrize(("failures", "bound"), [(1, 1), (2, 2), (3, 4), (5, 16), (7, 60), (50, 60)])
def test_delays_fill_a_range_that_doubles(failures: int, bound: float) -> None:
    rng = random.Random(failures)
    delays = [delay_seconds(failures, Patience(), rng) for _ in range(2000)]
    assert statistics.mean(delays) == pytest.approx(bound / 2, rel=0.1)
    assert max(delays) > 0.95 * bound
    assert min(delays) < 0.05 * bound


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 0),
        ("", 0),
        ("7", 7),
        (" 7 ", 7),
        ("0", 0),
        ("-5", 0),
        ("1.5", 0),
        ("soon", 0),
        ("٣", 0),  # a digit, but not of HTTP
        ("99999999999999999999", 900),
        ("Sun, 29 Nov 2026 12:00:30 GMT", 30),
        ("Sun, 29 Nov 2026 11:00:00 GMT", 0),
        ("Mon, 30 Nov 2026 12:00:00 GMT", 900),
        ("Sunday, 29-Nov-26 12:00:20 GMT", 20),  # the obsolete forms of RFC 9110, 5.6.7
        ("Sun Nov 29 12:00:10 2026", 10),
        ("Mon, 30 Feb 2026 12:00:00 GMT", 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float) -> None:
    assert retry_after_seconds(value, NOW, Patience()) == seconds


@given(st.text())
def test_any_retry_after_stays_within_bounds(value: str) -> None:
    assert 0 <= retry_after_seconds(value, NOW, Patience(longest_asked_seconds=2)) <= 2
