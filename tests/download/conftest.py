"""A hub for each test that asks for one; nobody's own token or settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import HubServer


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    nowhere = Path(tmp_path_factory.getbasetemp()) / "no-token"
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(nowhere))
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", str(nowhere))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server
