"""Ctrl-C at any step: KeyboardInterrupt where a signal's handler may run, the n-th such place in one file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType


def interrupted_everywhere(work: Callable[[], object], modules: list[ModuleType]) -> Iterator[int]:
    """Do `work` again and again, interrupted after its first call or return within `modules`, then after its second ...

    Yields the number of that place after each time, until nothing is left to interrupt. Signals come before a function
    begins and after one has returned, one written in C too, and nowhere else that matters here.
    """
    files = {module.__file__ for module in modules}
    place, came = 0, True
    while came:
        place += 1
        passed, came = 0, False

        def pass_by(frame: FrameType, event: str, arg: object) -> None:
            nonlocal passed, came
            if event in ("call", "return", "c_return") and frame.f_code.co_filename in files:
                passed += 1
                if passed == place:  # noqa: B023
                    sys.setprofile(None)
                    came = True
                    raise KeyboardInterrupt

        sys.setprofile(pass_by)
        try:
            work()
        except KeyboardInterrupt:
            if not came:  # a real one
                raise
        finally:
            sys.setprofile(None)
        yield place
