"""`make bench`: every benchmark in turn."""

from __future__ import annotations

import sys

from tests.benchmarks import (
    cache_trace,
    convert_slice,
    disk_over_time,
    download_speed,
    over_budget,
    overlap,
    run_slice,
    switches,
)

BENCHMARKS = (run_slice, over_budget, cache_trace, switches, convert_slice, download_speed, overlap, disk_over_time)

if __name__ == "__main__":
    sys.exit(max(each.main() for each in BENCHMARKS))
