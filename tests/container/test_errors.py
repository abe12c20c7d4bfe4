from __future__ import annotations

from typing import Any

from container import errors
from container.errors import MoedockError, PreflightError, UsageError, shown


def test_one_tree():
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) > 10
    assert all(issubclass(kind, MoedockError) for kind in classes)
    assert {kind.__name__: kind.exit_code for kind in classes if kind.exit_code != 1} == {UsageError.__name__: 2}


def test_preflight_lists_every_problem_once():
    error = PreflightError(["first", "second"])
    assert error.problems == ["first", "second"]
    assert str(error).splitlines() == [
        "cannot convert: 2 problem(s) found, nothing was written", "  - first", "  - second",
    ]  # fmt: skip


def test_preflight_cuts_a_long_list():
    lines = str(PreflightError([str(n) for n in range(100)], shown=3)).splitlines()
    assert lines[0].startswith("cannot convert: 100 problem(s)")
    assert lines[1:] == ["  - 0", "  - 1", "  - 2", "  … and 97 more"]


def test_shown_values_are_short_whatever_they_are():
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    for value in (nested, "x" * 10_000, [1] * 10_000, {str(n): n for n in range(1000)}, 1 << 4000):
        assert len(shown(value)) < 300
    assert shown("experts-L1.bin") == "'experts-L1.bin'"
    assert shown([2, 3]) == "[2, 3]"
