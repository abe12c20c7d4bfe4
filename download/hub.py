"""What only the hub can say: a repository's files at one commit, where each lies, and who is asking.

The one module that knows `huggingface_hub`; the files' bytes are fetched by `download.transfer`.
"""

from __future__ import annotations

import datetime
import math
import random
import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from container.errors import HubError, shown
from container.progress import duration
from download.folder import STATE_FOLDER
from download.listing import Listing, RemoteFile
from download.retry import Patience, Step, delay_seconds, judge, retry_after_seconds
from download.transfer import Stopped

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoSibling

DEFAULT_REVISION = "main"
# A hub that does not answer at all is more likely a wrong address, or no network, than one that will be back.
LISTING_SECONDS = 60.0
LISTING_DELAY_SECONDS = 10.0
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_TOO_MANY_REQUESTS = 429
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _UnansweredError(Exception):
    """The hub gave no answer, and may give one later."""

    def __init__(self, reason: str, *, busy: bool = False, retry_after: str | None = None) -> None:
        super().__init__(reason)
        self.busy = busy  # it is there, and asks us to come later
        self.retry_after = retry_after  # the header, where it says when


def say_nothing(line: str) -> None:
    """Tell nobody."""


class Hub:
    """A hub that speaks the API of huggingface.co. Nothing is asked before a method is called."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint

    @property
    def endpoint(self) -> str:
        """The hub's address: the one given, or HF_ENDPOINT, or https://huggingface.co."""
        from huggingface_hub import constants

        return (self._endpoint or constants.ENDPOINT).rstrip("/")

    def headers(self) -> dict[str, str]:
        """Headers of a request to the hub: our name and, where there is one, the user's token."""
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, but not declared so

        return dict(build_hf_headers(library_name="moedock"))

    def url(self, listing: Listing, name: str) -> str:
        """Where a file of the listing lies, at the listing's commit."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(listing.repository, name, revision=listing.commit, endpoint=self.endpoint)

    def listing(
        self,
        repository: str,
        revision: str | None = None,
        *,
        stop: threading.Event,
        patience: Patience,
        say: Callable[[str], None] = say_nothing,
    ) -> Listing:
        """All files of `repository` at the commit that `revision` (a branch, tag or commit; None: main) means now.

        Asks again while the hub does not answer: for a minute, or for as long as `patience` allows when it answers
        that it is busy. Raises HubError with what to do, Stopped when `stop` is set.
        """
        rng = random.Random()
        began = time.monotonic()
        failures = 0
        while True:
            try:
                return self._ask(repository, revision or DEFAULT_REVISION)
            except _UnansweredError as problem:
                failures += 1
                asked = retry_after_seconds(problem.retry_after, datetime.datetime.now(datetime.UTC), patience)
                limit = patience.give_up_seconds if problem.busy else min(LISTING_SECONDS, patience.give_up_seconds)
                left = began + limit - time.monotonic()
                if asked > left or left <= 0:
                    raise HubError(
                        f"{self.endpoint} gives no listing of {repository} ({problem}), asked {failures} time(s) in "
                        f"{duration(limit - left)}; check the network and HF_ENDPOINT, then run the same command again"
                    ) from None
                own = min(delay_seconds(failures, patience, rng), LISTING_DELAY_SECONDS)
                wait = min(max(asked, own), left)
                say(f"the hub gives no listing ({problem}); asking again in {math.ceil(wait)} s")
                if stop.wait(wait):
                    raise Stopped from None

    def _ask(self, repository: str, revision: str) -> Listing:
        from huggingface_hub import HfApi, errors

        # its bases tell the root of the library's HTTP client's errors: httpx's or, before version 1, requests'
        no_answer: tuple[type[Exception], ...] = (OSError, *errors.HfHubHTTPError.__bases__)
        where = f"{repository}@{revision}"
        if not self.endpoint.startswith(("http://", "https://")):
            raise HubError(f"HF_ENDPOINT must be an address like https://huggingface.co, found {shown(self.endpoint)}")
        try:
            info = HfApi(endpoint=self.endpoint).model_info(
                repository, revision=revision, files_metadata=True, timeout=LISTING_SECONDS / 2
            )
            return _listing(repository, info.sha, info.siblings)
        except HubError:
            raise
        except errors.OfflineModeIsEnabled:
            raise HubError(f"{where}: HF_HUB_OFFLINE is set, so the hub is not asked; unset it to download") from None
        except errors.HFValidationError:
            raise HubError(
                f"{shown(repository)} is no repository's name; give it as its page's address ends: ORG/NAME"
            ) from None
        except errors.HfHubHTTPError as error:
            raise self._refusal(repository, revision, error) from None
        # before the next: the JSONDecodeError of requests is an OSError, too
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise HubError(
                f"{self.endpoint}: the answer for {where} is no listing of a repository ({type(error).__name__}: "
                f"{error}); is HF_ENDPOINT the address of a hub, and does nothing stand between?"
            ) from None
        except no_answer as error:
            raise _UnansweredError(str(error) or type(error).__name__) from None

    def _refusal(self, repository: str, revision: str, error: HfHubHTTPError) -> Exception:
        from huggingface_hub import errors

        page = f"{self.endpoint}/{repository}"
        status = error.response.status_code
        if isinstance(error, errors.GatedRepoError):
            return HubError(f"{repository} is gated: accept its conditions at {page}, then {LOG_IN}")
        if isinstance(error, errors.DisabledRepoError):
            return HubError(f"{repository} was disabled on the hub; see {page}")
        if isinstance(error, errors.RevisionNotFoundError):
            return HubError(f"{repository} has no revision {shown(revision)}; {page} lists its branches and tags")
        if isinstance(error, errors.RepositoryNotFoundError):
            logged_in = any(name.lower() == "authorization" for name in self.headers())
            private = "private and closed to your token" if logged_in else f"private: {LOG_IN}"
            return HubError(
                f"{repository}: {self.endpoint} shows no such repository; the name is wrong, or it is {private}"
            )
        headers = error.response.headers
        if judge(status, redirected=False, headers=headers).step is Step.RETRY:
            return _UnansweredError(
                f"status {status}", busy=status == _TOO_MANY_REQUESTS, retry_after=headers.get("Retry-After")
            )
        said = error.server_message or headers.get("X-Error-Message") or "no reason given"
        if status in (401, 403):
            return HubError(f"{repository}: the hub refuses access (status {status}: {said}); {LOG_IN} of an account "
                            f"that may see {page}")  # fmt: skip
        return HubError(f"{repository}@{revision}: the hub refuses to list it (status {status}: {said})")


def _listing(repository: str, commit: str | None, siblings: list[RepoSibling] | None) -> Listing:
    if commit is None or not _COMMIT.fullmatch(commit) or siblings is None:
        raise ValueError(f"neither commit nor files: {shown(commit)}")
    where = f"{repository}@{commit[:12]}"
    files = [_remote_file(sibling, where) for sibling in siblings]
    return Listing(repository=repository, commit=commit, files={file.name: file for file in files})


def _remote_file(sibling: RepoSibling, where: str) -> RemoteFile:
    name = sibling.rfilename
    if not is_safe_path(name):
        raise HubError(f"{where}: refusing a file named {shown(name)}: it could land outside the folder")
    lfs = sibling.lfs
    size = sibling.size if lfs is None else lfs.size
    sha256 = None if lfs is None else lfs.sha256
    git_sha1 = sibling.blob_id if lfs is None else None  # of an LFS file it names the pointer
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise HubError(f"{where}: {name} is listed with the size {shown(size)}")
    if not (_is_digest(sha256, _SHA256) or _is_digest(git_sha1, _COMMIT)):
        raise HubError(f"{where}: {name} is listed without a checksum, so it could not be proved")
    return RemoteFile(name=name, n_bytes=size, sha256=sha256, git_sha1=git_sha1)


def _is_digest(value: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def is_safe_path(name: object) -> bool:
    """True for a relative path with slashes that stays inside its folder on every system, and is not ours."""
    if not isinstance(name, str) or "\\" in name or any(ord(mark) < 32 or ord(mark) == 127 for mark in name):
        return False
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair names no file
        return False
    parts = name.split("/")
    return not {"", ".", ".."} & set(parts) and parts[0].casefold() != STATE_FOLDER
