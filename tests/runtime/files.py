"""Direct reads for tests: whether the file system here allows them is not what most tests are about."""

from __future__ import annotations

from pathlib import Path

from runtime.disk.direct import DirectFiles


def direct_files(folder: Path) -> DirectFiles:
    """Files of a folder; what there is to say about reading them is dropped."""
    return DirectFiles(folder, lambda line: None)
