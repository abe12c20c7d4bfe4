"""What a repository holds at one commit, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a repository: large ones are listed with their sha256, small ones with git's sha1."""

    name: str  # its path in the repository, with slashes
    n_bytes: int
    sha256: str | None = None
    git_sha1: str | None = None  # of `blob <size>\0` and the bytes, as git names its objects


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All files of a repository at one commit."""

    repository: str  # ORG/NAME
    commit: str  # 40 hex digits: what a branch or tag meant when it was asked for
    files: Mapping[str, RemoteFile]
