"""Which family a checkpoint belongs to: chosen by its config, never by a flag."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from container.errors import ConfigError
from container.model import canonical_config
from convert.arch import kimi
from convert.arch.base import Architecture

# A new family is one file and one line here.
FAMILIES: dict[tuple[str, ...], Callable[[Mapping[str, Any]], Architecture]] = {
    kimi.MODEL_TYPES: kimi.describe,
}


def detect(release: Mapping[str, Any]) -> Architecture:
    """The architecture of a release's config.json.

    Raises ConfigError when no family claims its `model_type`, or the family finds a key it cannot use.
    """
    config = canonical_config(release)
    _require_writable(config)
    model_type = config.get("model_type")
    for model_types, describe in FAMILIES.items():
        if model_type in model_types:
            return describe(config)
    known = ", ".join(name for model_types in FAMILIES for name in model_types)
    raise ConfigError(f"config: `model_type` {model_type!r} is not supported; known are {known}")


def _require_writable(config: Mapping[str, Any]) -> None:
    """The manifest will hold the config: find out now, not after hours, that its nesting is too deep to write."""
    try:
        json.dumps([[config]], indent=1)  # two levels more than the manifest has
    except RecursionError:
        raise ConfigError("config.json: objects or lists are nested too deeply") from None
