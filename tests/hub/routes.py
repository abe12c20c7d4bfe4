"""What the hub's paths mean: from a request to the right answer."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub import replies
from tests.hub.faults import Part
from tests.hub.misbehave import LOOP_PATH
from tests.hub.replies import Asked, Reply
from tests.hub.repositories import Commit, RepoFile, Repository

_DEFAULT_URL_SECONDS = 3600.0


@dataclass
class _Grant:
    """What one signed URL allows."""

    file: RepoFile
    expires: float
    uses_left: int | None


class SignedUrls:
    """The storage's side of signed URLs: each opens one version of one file, a number of times or for a time."""

    def __init__(self, *, uses: int | None, seconds: float | None) -> None:
        self._uses = uses
        self._seconds = _DEFAULT_URL_SECONDS if seconds is None else seconds
        self._grants: dict[str, _Grant] = {}
        self._lock = threading.Lock()

    def sign(self, file: RepoFile) -> str:
        """Path and query of a new URL for the file."""
        signature = secrets.token_hex(16)
        with self._lock:
            self._grants[signature] = _Grant(file, time.monotonic() + self._seconds, self._uses)
        return f"/cdn/{file.sha256}?expires={int(time.time() + self._seconds)}&signature={signature}"

    def name(self, signature: str) -> str:
        """The file that a signature was for, "" where it is unknown."""
        grant = self._grants.get(signature)
        return grant.file.name if grant is not None else ""

    def open(self, sha256: str, signature: str) -> RepoFile | None:
        """The file, which uses the URL once; None where it is unknown, expired or used up."""
        with self._lock:
            grant = self._grants.get(signature)
            if grant is None or grant.file.sha256 != sha256 or time.monotonic() >= grant.expires:
                return None
            if grant.uses_left is not None:
                if grant.uses_left == 0:
                    return None
                grant.uses_left -= 1
            return grant.file

    def expire(self, signature: str | None = None) -> None:
        """End one URL, or (None) every one given out so far."""
        with self._lock:
            for known, grant in self._grants.items():
                if signature in (None, known):
                    grant.expires = 0.0


@dataclass(frozen=True)
class Route:
    """Where a request goes, and what gives the right answer to it; `signature` is the signed URL's."""

    part: Part
    name: str
    answer: Callable[[Asked], Reply]
    signature: str = ""


class Router:
    """Finds the route of a path among repositories, aliases and signed URLs.

    Args:
        tokens: Accepted tokens → the gated repositories each may read ("*": all).
        cdn_endpoint: Scheme, host and port of the signed URLs.
    """

    def __init__(
        self,
        repositories: Mapping[str, Repository],
        aliases: Mapping[str, str],
        tokens: Mapping[str, frozenset[str]],
        signed: SignedUrls,
        cdn_endpoint: str,
    ) -> None:
        self._repositories = repositories
        self._aliases = aliases
        self._tokens = tokens
        self._signed = signed
        self._cdn_endpoint = cdn_endpoint

    def route(self, path: str) -> Route:
        """The route of a request target (path and query)."""
        split = urlsplit(path)
        query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        pieces = [unquote(piece) for piece in split.path.strip("/").split("/")]
        if pieces[0] == "cdn" and len(pieces) == 2:
            signature = query.get("signature", "")
            name = self._signed.name(signature)
            return Route(Part.CDN, name, lambda asked: self._cdn(pieces[1], signature, asked), signature)
        if pieces[:2] == ["api", "models"] and len(pieces) >= 4:
            return Route(Part.API, "", lambda asked: self._api("/".join(pieces[2:4]), pieces[4:], query, asked))
        if len(pieces) >= 5 and pieces[2] == "resolve":
            repo_id, revision, name = "/".join(pieces[:2]), pieces[3], "/".join(pieces[4:])
            return Route(Part.HUB, name, lambda asked: self._resolve(repo_id, revision, name, asked))
        if split.path == LOOP_PATH:
            return Route(Part.HUB, "", lambda asked: replies.redirect(LOOP_PATH))
        return Route(
            Part.HUB, "", lambda asked: replies.error(404, None, "Sorry, we can't find the page you are looking for.")
        )

    def _find(self, repo_id: str, asked: Asked, *, contents: bool) -> Repository | Reply:
        """The repository, or why this token may not see it (`contents`: its files rather than its listing)."""
        if asked.token is not None and asked.token not in self._tokens:
            return replies.error(401, None, "Invalid credentials in Authorization header")
        repository = self._repositories.get(repo_id)
        if repository is None or (repository.private and asked.token is None):
            if asked.token is None:
                return replies.error(401, "RepoNotFound", "Invalid username or password.")
            return replies.error(404, "RepoNotFound", "Repository not found")
        if repository.disabled:
            return replies.error(403, None, "Access to this resource is disabled.")
        if contents and repository.gated:
            if asked.token is None:
                message = f"Access to model {repo_id} is restricted. You must have access to it and be authenticated."
                return replies.error(401, "GatedRepo", message)
            if not self._tokens[asked.token] & {repo_id, "*"}:
                message = f"Access to model {repo_id} is restricted and you are not in the authorized list."
                return replies.error(403, "GatedRepo", message)
        return repository

    def _api(self, repo_id: str, rest: list[str], query: dict[str, str], asked: Asked) -> Reply:
        if repo_id in self._aliases:
            tail = "".join(f"/{piece}" for piece in rest)
            return replies.redirect(f"/api/models/{self._aliases[repo_id]}{tail}?{_encoded(query)}", 307)
        repository = self._find(repo_id, asked, contents=False)
        if isinstance(repository, Reply):
            return repository
        what, revision = (rest[0], rest[1]) if len(rest) >= 2 else ("revision", "main")
        commit = repository.find(revision)
        if commit is None:
            return _no_revision(revision)
        if what == "revision" and len(rest) in (0, 2):
            return replies.model_info(repository, commit, blobs=query.get("blobs", "").lower() in ("true", "1"))
        found = None
        if what == "tree":
            recursive = query.get("recursive", "").lower() in ("true", "1")
            found = replies.tree(commit, "/".join(rest[2:]), recursive=recursive)
        return found or replies.error(404, "EntryNotFound", "Entry not found")

    def _resolve(self, repo_id: str, revision: str, name: str, asked: Asked) -> Reply:
        if repo_id in self._aliases:
            return replies.redirect(replies.resolve_path(self._aliases[repo_id], revision, name), 307)
        repository = self._find(repo_id, asked, contents=True)
        if isinstance(repository, Reply):
            return repository
        commit = repository.find(revision)
        if commit is None:
            return _no_revision(revision)
        seen = {"X-Repo-Commit": commit.sha}
        file = commit.files.get(name)
        if file is None:
            return replies.error(404, "EntryNotFound", "Entry not found", seen)
        if file.lfs:
            return self._linked(file, commit)
        return replies.file_reply(file, file.hub_etag, asked, seen)

    def _linked(self, file: RepoFile, commit: Commit) -> Reply:
        linked = {
            "X-Repo-Commit": commit.sha,
            "X-Linked-ETag": file.hub_etag,
            "X-Linked-Size": str(file.size_bytes),
            "Accept-Ranges": "bytes",
        }
        return replies.redirect(self._cdn_endpoint + self._signed.sign(file), headers=linked)

    def _cdn(self, sha256: str, signature: str, asked: Asked) -> Reply:
        file = self._signed.open(sha256, signature)
        if file is None:
            return replies.storage_error(403, "AccessDenied")
        return replies.file_reply(file, file.cdn_etag, asked, {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"})


def _no_revision(revision: str) -> Reply:
    return replies.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")


def _encoded(query: dict[str, str]) -> str:
    return "&".join(f"{name}={value}" for name, value in query.items())
