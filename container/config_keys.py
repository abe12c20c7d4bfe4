"""Typed look-ups in a model config that came from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from container.errors import ConfigError, shown

# Of one dimension or count: far above any model, and small enough that no sum of products surprises anybody.
MAX_SIZE = 1 << 32
MAX_FLOAT = 3e38  # what float32 holds


class ConfigKeys:
    """Typed look-ups in a config; every failure names the key."""

    def __init__(self, config: Mapping[str, Any], path: str = "") -> None:
        self.config = config
        self.path = path

    def get(self, key: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.config:
            raise ConfigError(f"config: `{self.path}{key}` is missing")
        return self.config[key]

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number in range; `default` where the key is absent or null."""
        value = default if default is not None and self.config.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(
                f"config: `{self.path}{key}` must be a whole number from {least} to {most}, found {shown(value)}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; `default` where the key is absent or null."""
        value = default if default is not None and self.config.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_FLOAT:
            raise ConfigError(f"config: `{self.path}{key}` must be a finite number, found {shown(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None where the key is absent or null."""
        return None if self.config.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """True or false; false where the key is absent or null."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"config: `{self.path}{key}` must be true or false, found {shown(value)}")
        return bool(value)

    def section(self, key: str) -> ConfigKeys:
        """The object under a key."""
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise ConfigError(f"config: `{self.path}{key}` must be an object, found {shown(value)}")
        return ConfigKeys(value, f"{self.path}{key}.")
