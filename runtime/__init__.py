"""Runs a container under a memory budget: experts come from disk, one read each.

    import runtime

    with runtime.open("model.waste", budget="8GiB") as model:
        for text in model.generate("The library", n=40):
            print(text, end="", flush=True)

Both functions are loaded when they are first used, since compiled code takes a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.api import open_model as open  # noqa: A004 - meant to be read as runtime.open
    from runtime.memory.planning import plan

__all__ = ["open", "plan"]


def __getattr__(name: str) -> Any:
    if name == "open":
        from runtime.api import open_model

        return open_model
    if name == "plan":
        from runtime.memory.planning import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
