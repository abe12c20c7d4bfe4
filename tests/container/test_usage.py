"""usage.waste: its bytes, made by hand, and every way in which a file may be of no use."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from container.errors import FormatError
from container.layout import USAGE_NAME
from container.usage import Usage, read_usage, write_usage

LAYERS, N_EXPERTS = (1, 2, 5), 4
HEADER = struct.pack("<IIQ", 0x47535557, 1, 300)
GOOD = HEADER + struct.pack("<HHIII", 1, 3, 7, 299, 0) + struct.pack("<HHIII", 5, 0, 2**32 - 1, 4, 123)


def counts(values: dict[tuple[int, int], int]) -> np.ndarray:
    found = np.zeros((len(LAYERS), N_EXPERTS), dtype=np.int64)
    for place, value in values.items():
        found[place] = value
    return found


def test_bytes_made_by_hand(tmp_path: Path) -> None:
    (tmp_path / USAGE_NAME).write_bytes(GOOD)
    usage = read_usage(tmp_path, LAYERS, N_EXPERTS)
    assert usage is not None
    assert usage.n_tokens == 300
    np.testing.assert_array_equal(usage.hits, counts({(0, 3): 7, (2, 0): 2**32 - 1}))
    np.testing.assert_array_equal(usage.last_seen, counts({(0, 3): 299, (2, 0): 4}))
    assert usage.pack() == GOOD[:-4] + bytes(4)


def test_counts_beyond_the_field_are_written_as_its_largest_number() -> None:
    usage = Usage(LAYERS, 2**40, counts({(1, 2): 2**33}), counts({(1, 2): 2**39}))
    expected = struct.pack("<IIQ", 0x47535557, 1, 2**40) + struct.pack("<HHIII", 2, 2, 2**32 - 1, 2**32 - 1, 0)
    assert usage.pack() == expected


@given(
    hnp.arrays(np.int64, (3, 4), elements=st.sampled_from([0, 0, 1, 70_000])),
    hnp.arrays(np.int64, (3, 4), elements=st.integers(0, 10**6)),
)
def test_there_and_back(hits: np.ndarray, last_seen: np.ndarray) -> None:
    last_seen = np.where(hits > 0, last_seen, 0)
    found = Usage.unpack(Usage(LAYERS, 10**6, hits, last_seen).pack(), LAYERS, N_EXPERTS, source="x")
    np.testing.assert_array_equal(found.hits, hits)
    np.testing.assert_array_equal(found.last_seen, last_seen)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes are too few"),
        (HEADER[:15], "15 bytes are too few"),
        (b"WEXP" + GOOD[4:], "magic is 0x50584557, expected 0x47535557"),
        (GOOD[:4] + struct.pack("<I", 2) + GOOD[8:], "version is 0x2, expected 0x1"),
        (GOOD + b"\0", "1 bytes follow the last whole entry"),
        (HEADER + struct.pack("<HHIII", 3, 0, 1, 1, 0), "layer 3 expert 0 is none of this model's"),
        (HEADER + struct.pack("<HHIII", 9, 0, 1, 1, 0), "layer 9 expert 0 is none of this model's"),
        (HEADER + struct.pack("<HHIII", 2, 4, 1, 1, 0), "layer 2 expert 4 is none of this model's"),
        (GOOD + GOOD[16:32], "an expert has two entries"),
        (HEADER + bytes(16 * 13), "at most 208 bytes expected for this model, found more"),
    ],
)
def test_a_file_of_no_use_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / USAGE_NAME).write_bytes(data)
    with pytest.raises(FormatError, match=rf"{USAGE_NAME}: {said}"):
        read_usage(tmp_path, LAYERS, N_EXPERTS)


@given(st.binary(max_size=80), st.integers(0, 16))
def test_no_bytes_crash(data: bytes, kept: int) -> None:
    with contextlib.suppress(FormatError):
        Usage.unpack(GOOD[:kept] + data, LAYERS, N_EXPERTS, source="x")


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / USAGE_NAME).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match="found more"):
        read_usage(tmp_path, LAYERS, N_EXPERTS)


def test_what_is_no_file(tmp_path: Path) -> None:
    assert read_usage(tmp_path, LAYERS, N_EXPERTS) is None
    (tmp_path / USAGE_NAME).mkdir()
    with pytest.raises(FormatError, match="is not a regular file"):
        read_usage(tmp_path, LAYERS, N_EXPERTS)


def test_writing_leaves_one_whole_file(tmp_path: Path) -> None:
    for hits in (1, 2):
        write_usage(tmp_path, Usage(LAYERS, 5, counts({(0, 0): hits}), counts({(0, 0): 5})))
    assert [path.name for path in tmp_path.iterdir()] == [USAGE_NAME]
    found = read_usage(tmp_path, LAYERS, N_EXPERTS)
    assert found is not None
    assert found.hits[0, 0] == 2
