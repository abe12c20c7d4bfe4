"""Model repositories held by the loopback hub: files, commits, branches and tags."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

LFS_THRESHOLD_BYTES = 10 * 2**20
Content = bytes | Path
_PIECE_BYTES = 2**20


def is_lfs(name: str, size_bytes: int, threshold_bytes: int = LFS_THRESHOLD_BYTES) -> bool:
    """True for the files the hub keeps outside git and serves through a signed URL."""
    leaf = PurePosixPath(name).name
    return leaf.endswith(".safetensors") or leaf == "tiktoken.model" or size_bytes > threshold_bytes


@dataclass(frozen=True)
class RepoFile:
    """One version of one file; `content` is its bytes or the path they are read from."""

    name: str
    content: Content
    lfs: bool

    @cached_property
    def size_bytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for piece in self.pieces(0, self.size_bytes):
            digest.update(piece)
        return digest.hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git stores in place of an LFS file (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size_bytes}\n".encode()
        )

    @cached_property
    def blob_id(self) -> str:
        """git's name for the blob: sha1 of `blob SIZE NUL CONTENT`, of the pointer for an LFS file."""
        size_bytes = len(self.pointer) if self.lfs else self.size_bytes
        digest = hashlib.sha1(f"blob {size_bytes}\0".encode())
        for piece in [self.pointer] if self.lfs else self.pieces(0, self.size_bytes):
            digest.update(piece)
        return digest.hexdigest()

    @property
    def hub_etag(self) -> str:
        """What the hub part calls this version: the sha256 of an LFS file, the blob's name otherwise; quoted."""
        return f'"{self.sha256 if self.lfs else self.blob_id}"'

    @property
    def cdn_etag(self) -> str:
        """The storage's own tag, unlike the hub's, as S3 gives one."""
        return f'"{hashlib.md5(self.sha256.encode(), usedforsecurity=False).hexdigest()}"'

    def pieces(self, start: int, stop: int) -> Iterable[bytes]:
        """Bytes [start, stop) of the content, in pieces of at most 1 MiB."""
        if isinstance(self.content, bytes):
            for offset in range(start, stop, _PIECE_BYTES):
                yield self.content[offset : min(stop, offset + _PIECE_BYTES)]
            return
        with self.content.open("rb") as stream:
            stream.seek(start)
            while start < stop and (piece := stream.read(min(_PIECE_BYTES, stop - start))):
                start += len(piece)
                yield piece


@dataclass(frozen=True)
class Commit:
    """A frozen state of a repository; `sha` is 40 hex digits."""

    sha: str
    files: Mapping[str, RepoFile]


def folder_files(folder: Path) -> dict[str, Content]:
    """Every file below a folder, by its path relative to it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


class Repository:
    """A model repository with its history. Readers see whole commits only, so it may change while it is served."""

    def __init__(
        self,
        repo_id: str,
        *,
        private: bool = False,
        gated: bool = False,
        lfs_threshold_bytes: int = LFS_THRESHOLD_BYTES,
    ) -> None:
        self.repo_id = repo_id
        self.private = private
        self.gated = gated
        self.disabled = False
        self._lfs_threshold_bytes = lfs_threshold_bytes
        self._commits: dict[str, Commit] = {}
        self._refs: dict[str, str] = {}

    def commit(
        self,
        files: Mapping[str, Content] | Path,
        *,
        delete: Iterable[str] = (),
        branch: str = "main",
    ) -> Commit:
        """Add a commit on `branch`, which moves it: its files so far less `delete`, plus `files`.

        Args:
            files: name → bytes or path, or a folder.
        """
        parent = self.find(branch)
        merged = dict(parent.files) if parent is not None else {}
        for name in delete:
            del merged[name]
        for name, content in (folder_files(files) if isinstance(files, Path) else files).items():
            size_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
            merged[name] = RepoFile(name, content, is_lfs(name, size_bytes, self._lfs_threshold_bytes))
        listing = "\n".join(f"{name} {merged[name].blob_id}" for name in sorted(merged))
        above = parent.sha if parent is not None else ""
        sha = hashlib.sha1(f"{self.repo_id}\n{above}\n{listing}".encode()).hexdigest()
        added = Commit(sha, {name: merged[name] for name in sorted(merged)})
        self._commits[sha] = added
        self._refs[branch] = sha
        return added

    def tag(self, name: str, commit: Commit) -> None:
        """Give a commit a name, or move a branch or tag to it."""
        self._refs[name] = self._commits[commit.sha].sha

    def find(self, revision: str) -> Commit | None:
        """The commit that a branch, a tag or 40 hex digits name, or None."""
        return self._commits.get(self._refs.get(revision, revision))
