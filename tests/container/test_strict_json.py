from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.strict_json import parse_object

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), values), st.booleans())
def test_any_object_comes_back(value, ascii_only):
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_escaped_pairs_are_characters():
    assert parse_object(b'{"\\ud83d\\ude00": 1}') == {"\N{GRINNING FACE}": 1}


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"1", b'"a"', b"null", b'{"a":1}x', b"\xef\xbb\xbf{}", b'{"a":\xff}', b'{"a":NaN}',
        b'{"a":-Infinity}', b'{"a":1,"a":1}', b'{"b":{"a":1,"a":2}}', b'{"a":"\\ud800"}', b'{"\\uDC00":1}',
        b'{"a":' + b"[" * 200_000, b'{"a":' + b"1" * 5000 + b"}",
        b'{"a":1e999}', b'{"a":[-1.5e309]}',
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_everything_else_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"\w"):
        parse_object(text)
