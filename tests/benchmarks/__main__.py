"""`make bench`: every benchmark in turn."""

from __future__ import annotations

import sys

from tests.benchmarks import convert_slice, disk_over_time, download_speed, overlap

if __name__ == "__main__":
    sys.exit(max(each.main() for each in (convert_slice, download_speed, overlap, disk_over_time)))
