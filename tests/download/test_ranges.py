"""Which answers hold the bytes that were asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requests.structures import CaseInsensitiveDict

from download.answer import Head, HitchError
from download.ranges import MisplacedError, Wanted, accepted

FILE = Wanted(total=100)  # a whole file of known size
PIECE = Wanted(start=10, n_bytes=20)
BEGINNING = Wanted(n_bytes=20)
REST = Wanted(start=40)
ALL = Wanted()


def head(status: int, etag: str | None = "e", **headers: str) -> Head:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Head(status, CaseInsensitiveDict(names), False, etag)


@pytest.mark.parametrize(
    ("wanted", "have", "header"),
    [
        (FILE, 0, None),
        (FILE, 7, "bytes=7-"),
        (PIECE, 0, "bytes=10-29"),
        (PIECE, 5, "bytes=15-29"),
        (BEGINNING, 0, "bytes=0-19"),
        (REST, 0, "bytes=40-"),
        (ALL, 0, None),
        (ALL, 3, "bytes=3-"),
    ],
)
def test_what_is_asked(wanted: Wanted, have: int, header: str | None) -> None:
    assert wanted.header(have).get("Range") == header


@pytest.mark.parametrize(
    ("wanted", "have", "answer", "expected"),
    [
        (FILE, 0, head(200, content_length="100"), (0, 100)),
        (FILE, 0, head(200), (0, 100)),  # chunked: the count and the checksum tell
        (FILE, 7, head(200, content_length="100"), (0, 100)),  # from the start, whatever was asked
        (FILE, 7, head(206, content_range="bytes 7-99/100", content_length="93"), (7, 93)),
        (FILE, 7, head(206, content_range="bytes 7-99/*"), (7, 93)),
        (PIECE, 5, head(206, content_range="bytes 15-29/1000", content_length="15"), (15, 15)),
        (BEGINNING, 0, head(200, content_length="100"), (0, 20)),
        (REST, 0, head(206, content_range="bytes 40-99/100"), (40, 60)),
        (ALL, 0, head(200, content_length="5"), (0, 5)),
        (ALL, 0, head(200), (0, None)),
        (FILE, 0, head(200, content_length="100", content_encoding="identity"), (0, 100)),
    ],
)
def test_good_answers(wanted: Wanted, have: int, answer: Head, expected: tuple[int, int | None]) -> None:
    assert accepted(wanted, have, "e", answer) == expected


@pytest.mark.parametrize(
    ("wanted", "have", "answer"),
    [
        (FILE, 7, head(206, "other", content_range="bytes 7-99/100")),
        (FILE, 7, head(206, None, content_range="bytes 7-99/100")),
        (FILE, 7, head(206, content_range="bytes 8-99/100")),
        (FILE, 7, head(206, content_range="bytes 0-99/100")),
        (FILE, 7, head(206, content_range="bytes 7-100/101")),
        (PIECE, 5, head(206, content_range="bytes 10-29/1000")),
    ],
)
def test_answers_for_other_bytes_begin_anew(wanted: Wanted, have: int, answer: Head) -> None:
    with pytest.raises(MisplacedError):
        accepted(wanted, have, "e", answer)


@pytest.mark.parametrize(
    ("wanted", "have", "answer"),
    [
        (FILE, 0, head(200, content_length="99")),
        (FILE, 0, head(200, content_length="101")),
        (FILE, 7, head(206)),
        (FILE, 7, head(206, content_range="bytes 7-50/100")),
        (FILE, 7, head(206, content_range="bytes 7-99/100", content_length="92")),
        (FILE, 7, head(206, content_range="bytes 7-99/100", content_length="94")),
        (FILE, 7, head(206, content_range="7-99/100")),
        (FILE, 7, head(206, content_range="bytes */100")),
        (FILE, 7, head(206, content_range="bytes 99-7/100")),
        (FILE, 0, head(200, content_length="100", content_encoding="gzip")),
        (FILE, 0, head(206, content_range="bytes 0-99/100", content_encoding="br")),
        (PIECE, 0, head(200, content_length="1000")),
        (BEGINNING, 0, head(200, content_length="19")),
    ],
)
def test_wrong_answers_are_asked_for_again(wanted: Wanted, have: int, answer: Head) -> None:
    with pytest.raises(HitchError):
        accepted(wanted, have, "e", answer)


@given(st.integers(0, 120), st.text(max_size=40), st.text(max_size=8), st.sampled_from([200, 206]))
def test_no_header_makes_it_take_bytes_at_another_place(
    have: int, content_range: str, length: str, status: int
) -> None:
    have = min(have, 99)
    answer = head(status, content_range=content_range, content_length=length)
    try:
        offset, n_bytes = accepted(FILE, have, "e", answer)
    except HitchError:
        return
    assert n_bytes is not None
    assert offset in {0, have}
    assert offset + n_bytes == 100
