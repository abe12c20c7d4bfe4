"""Hypothesis profiles: the same examples on every machine by default, many fresh ones with HYPOTHESIS_PROFILE=deep."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

# A shell starts background jobs deaf to Ctrl-C, and what they start is deaf too: tests that press it would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests write nothing into the working directory; hypothesis keeps a cache of its own there unless told otherwise.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "moedock-hypothesis")

# A slow example is no defect here: the machine may be busy. A function-scoped tmp_path is fine where every
# example overwrites what it reads.
_COMMON = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("repeatable", _COMMON, derandomize=True, max_examples=50)
settings.register_profile("deep", _COMMON, derandomize=False, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
