"""One conversion of each family, shared by the tests that only look at it."""

from __future__ import annotations

import pytest

import convert.run
from tests.convert.small import Converted, converted, serial_work, small_k3, small_kimi_linear


@pytest.fixture(scope="session")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The small K3 checkpoint, converted by one worker. Not to be changed."""
    return converted(tmp_path_factory.mktemp("k3"), small_k3())


@pytest.fixture(scope="session")
def kimi_linear(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The small Kimi-Linear checkpoint, converted by one worker. Not to be changed."""
    return converted(tmp_path_factory.mktemp("kimi_linear"), small_kimi_linear())


@pytest.fixture(params=["k3", "kimi_linear"])
def family(request: pytest.FixtureRequest) -> Converted:
    """Each family in turn."""
    found: Converted = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions run their jobs in the test's own process, where they can be watched and are quicker."""
    monkeypatch.setattr(convert.run, "run_work", serial_work)
