"""`make bench`: every benchmark in turn."""

from __future__ import annotations

import sys

from tests.benchmarks import convert_slice

if __name__ == "__main__":
    sys.exit(convert_slice.main())
