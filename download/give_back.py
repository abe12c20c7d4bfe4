"""Giving a shard back: what may be deleted, and the order that survives a crash at any point."""

from __future__ import annotations

import os
from pathlib import Path

from container.errors import SourceError
from container.publish import sync_folder
from download.folder import SourceFolder
from download.ledger import Ledger, Reclaimed


def files_of(path: Path) -> list[Path]:
    """What has to go so that a shard's bytes are free: the file; in huggingface_hub's cache its blob, then the link.

    Raises SourceError for a shard whose bytes others hold too, or may hold: deleting it would free nothing, or take
    it from them.
    """
    if not path.is_symlink():
        _require_no_hard_links(path, path)
        return [path]
    folder = path.parent.resolve()  # which may itself be reached by a link
    snapshots, blob = folder.parent, folder / path.readlink()
    target = os.path.realpath(blob)
    in_cache = snapshots.name == "snapshots" and Path(target).parent == (snapshots.parent / "blobs").resolve()
    if not in_cache or blob.is_symlink():
        raise SourceError(
            f"{path}: is a link to {blob}, which others may use; convert without --reclaim, or put the file itself here"
        )
    _require_no_hard_links(path, blob)
    for other in snapshots.rglob("*"):
        if other != folder / path.name and other.is_symlink() and os.path.realpath(other) == target:
            raise SourceError(
                f"{path}: {other} uses the same blob; delete that snapshot first, or convert without --reclaim"
            )
    return [blob, path]


def give_back(folder: SourceFolder, ledger: Ledger, shard: str, into: Path) -> int:
    """Delete a shard of which nothing is needed any more; the ledger says so first. Returns the bytes freed.

    Called again after a crash in between, it finishes. Raises SourceError as `files_of` does.
    """
    path = folder.file(shard)
    doomed = files_of(path)
    here = path.exists()
    n_bytes = path.stat().st_size if here else 0
    if here or shard not in ledger.reclaimed:  # said before: by a run killed before it was durable, or of another OUT
        ledger.say_reclaimed(Reclaimed(shard, n_bytes, str(into.resolve())))
    for each in doomed:
        each.unlink(missing_ok=True)
        sync_folder(each.parent)  # a blob must be gone for good before the link that leads to it
    return n_bytes


def _require_no_hard_links(path: Path, file: Path) -> None:
    if file.exists() and file.stat().st_nlink > 1:
        raise SourceError(
            f"{path}: has {file.stat().st_nlink} hard links, so deleting it frees nothing; remove the others, or "
            "convert without --reclaim"
        )
