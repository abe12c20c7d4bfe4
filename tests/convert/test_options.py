"""Options: what is refused, and that hostile numbers cost nothing."""

from __future__ import annotations

import contextlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import UsageError
from convert.options import ConvertOptions, parse_layers


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("3", {3}),
        ("0", {0}),
        ("1-3", {1, 2, 3}),
        ("1-3,7, 9 ", {1, 2, 3, 7, 9}),
        ("4-4", {4}),
        ("2,2,1-2", {1, 2}),
        ("007", {7}),
    ],
)
def test_layer_lists(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "1,", "a", "-1", "1-", "3-1", "1-2-3", "1.5", "²", "٣", "0x1", "1e3", "1 2", "+1", "1--2", "-"),
        *("0-99999999999", "1" * 5000, "0-" + "9" * 5000),
    ],
)
def test_no_layer_lists(text):
    """Refused at once, also where taking it at its word would fill the memory."""
    with pytest.raises(UsageError, match=r"--layers: .* is neither a layer number nor a range like 1-10"):
        parse_layers(text)


@given(layers=st.sets(st.integers(0, 5000), min_size=1, max_size=30))
def test_any_list_is_read(layers):
    assert parse_layers(",".join(map(str, layers))) == layers


@given(text=st.text(max_size=20))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(UsageError):
        assert all(layer >= 0 for layer in parse_layers(text))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"workers": 0}, "--workers must be at least 1"),
        ({"workers": -3}, "--workers must be at least 1"),
        ({"trunk_bits": 3}, "--trunk-bits must be 4 or 8"),
        ({"seed": -1}, "--seed must be between"),
        ({"seed": 1 << 31}, "--seed must be between"),
        ({"layers": frozenset()}, "--layers names no layer"),
    ],
)
def test_refused_options(tmp_path, change, text):
    with pytest.raises(UsageError, match=text):
        ConvertOptions(source=tmp_path / "a", output=tmp_path / "b", **change)


@pytest.mark.parametrize(("source", "output"), [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "x/../a/b"), ("a", "l")])
def test_source_and_output_must_be_apart(tmp_path, source, output):
    (tmp_path / "a").mkdir()
    (tmp_path / "l").symlink_to(tmp_path / "a")
    with pytest.raises(UsageError, match="must not lie inside each other"):
        ConvertOptions(source=tmp_path / source, output=tmp_path / output)


def test_neighbours_are_fine(tmp_path):
    ConvertOptions(source=tmp_path / "a", output=tmp_path / "ab")


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python 3.13 leaves a loop of links to later checks")
@pytest.mark.parametrize(("source", "output"), [("loop", "b"), ("a", "loop")])
def test_a_loop_of_links_is_refused(tmp_path, source, output):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UsageError, match="cannot be followed"):
        ConvertOptions(source=tmp_path / source, output=tmp_path / output)


def test_shaping_options_are_those_that_shape(tmp_path):
    options = ConvertOptions(source=tmp_path / "a", output=tmp_path / "b", workers=3, layers=frozenset({1}), seed=7)
    assert options.shaping == {"seed": 7, "trunk_bits": 4, "format": "VQ3R", "quality": "balanced", "device": "cpu"}
