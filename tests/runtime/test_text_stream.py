"""Text that appears as its bytes come, against decoding everything at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from container.errors import UsageError
from runtime.text.text_stream import TextStream

# few letters, so that stop strings occur, overlap and nearly occur
TEXT = st.text(st.sampled_from("aabbc é漢😀\n"), max_size=40)
DATA = st.one_of(TEXT.map(str.encode), st.binary(max_size=40))
# beginnings of characters: one in 64 has them all, since a last byte carries six bits; surrogates are no characters,
# but Python notices that only at the third byte
_ENCODED = [chr(code).encode(errors="surrogatepass") for code in range(0x80, 0x110000, 64)]
INCOMPLETE = {encoded[:n] for encoded in _ENCODED for n in range(1, len(encoded))}
STOPS = st.lists(st.text(st.sampled_from("aabbc é漢�"), min_size=1, max_size=5), max_size=3)


def slow(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Everything up to the stop string that is complete first, and which one that is."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(bounds)]


@given(DATA, STOPS, st.lists(st.integers(0, 1000), max_size=40))
@example(b"aab", ["aab", "ab"], [1, 2])
@example(b"aaab", ["aab"], [2])
@example(b"xaaby aab", ["aab"], [4, 5])
@example(b"ababc", ["ababd", "abc"], [1, 2, 3, 4])
@example("é".encode()[:1] + b"a", ["�a"], [1])
def test_all_pieces_are_the_text_up_to_the_stop_string(data: bytes, stops: list[str], cuts: list[int]) -> None:
    """… and what is shown at any time is the most that no later byte can change."""
    expected, stop = slow(data.decode(errors="replace"), stops)
    stream, shown, seen = TextStream(stops), "", b""
    for piece in pieces_of(data, cuts):
        shown += stream.feed(piece)
        seen += piece
        assert shown == certain(seen, stops)
    shown += stream.finish()
    assert (shown, stream.stopped) == (expected, stop)


def certain(data: bytes, stops: list[str]) -> str:
    """What is fixed by the first bytes: complete characters that are not the beginning of a stop string."""
    n_incomplete = next((n for n in (1, 2, 3) if data[-n:] in INCOMPLETE), 0)
    text, stop = slow(data[: len(data) - n_incomplete].decode(errors="replace"), stops)
    if stop is not None:
        return text
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(begun, default=0)]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="must not be empty"):
        TextStream(["a", ""])


def test_the_beginning_of_one_stop_string_may_be_left_out_at_the_end() -> None:
    stream = TextStream(["\n\nUser:", "\n\n\n"])
    assert stream.feed(b"yes\n\n") == "yes"
    assert stream.begun("\n\nUser:") == 2
    assert stream.finish(unless="\n\nUser:") == ""
    stream = TextStream(["END", "NO"])
    assert stream.feed(b"oh N") == "oh "
    assert stream.finish(unless="END") == "N"


def test_work_per_byte_does_not_grow_with_what_came_before() -> None:
    """A stop string that nearly comes again and again is the worst case of a naive search."""
    stream = TextStream(["a" * 2000 + "b"])
    shown = sum(len(stream.feed(b"a" * 11)) for _ in range(10_000))
    assert shown == 110_000 - 2000
    assert len(stream.finish()) == 2000
