"""Typed look-ups in a JSON object of a container's own files."""

from __future__ import annotations

from typing import Any

from container.errors import FormatError, shown
from container.layout import is_plain_file_name


class JsonObject:
    """Typed look-ups in a JSON object; every failure says where."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, dict):
            raise FormatError(f"{where}: must be an object, found {type(raw).__name__}")
        self.raw = raw
        self.where = where

    def value(self, key: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.raw:
            raise FormatError(f"{self.where}: `{key}` is missing")
        return self.raw[key]

    def count(self, key: str, *, least: int = 0, most: int = (1 << 63) - 1) -> int:
        """A whole number in range."""
        value = self.value(key)
        if not is_count(value, least=least, most=most):
            raise FormatError(
                f"{self.where}: `{key}` must be a whole number from {least} to {most}, found {shown(value)}"
            )
        return int(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self.value(key)
        if not isinstance(value, str):
            raise FormatError(f"{self.where}: `{key}` must be a string, found {shown(value)}")
        return value

    def file_name(self, key: str) -> str:
        """A plain name inside the container's folder, never a path out of it."""
        name = self.text(key)
        if not is_plain_file_name(name):
            raise FormatError(f"{self.where}: `{key}` must be a plain file name, found {shown(name)}")
        return name

    def mapping(self, key: str) -> dict[str, Any]:
        """An object."""
        return JsonObject(self.value(key), f"{self.where}: `{key}`").raw


def is_count(value: Any, *, least: int = 0, most: int = (1 << 63) - 1) -> bool:
    """True for a whole number (not a boolean) in range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
