"""One request and its answer, received by a thread of its own: receiving, writing and hashing overlap, and whoever
waits for bytes can stop waiting at any time, whatever the socket is doing.
"""

from __future__ import annotations

import contextlib
import http.client
import queue
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import requests
import urllib3

from download.retry import LEAST_BYTES_PER_SECOND, Patience

BLOCK_BYTES = 512 << 10
QUEUED_BLOCKS = 4
POLL_SECONDS = 0.25
MOST_HOPS = 10

_REDIRECTS = {301, 302, 303, 307, 308}
_NO_URL = (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema, requests.exceptions.MissingSchema)
_BROKEN = (requests.RequestException, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)
_LONGEST_WORDS = 200
_HOP_BYTES = 1 << 16


class Stopped(Exception):  # noqa: N818 - no error: somebody asked for it
    """Whoever asked for bytes has been told to stop."""


class HitchError(Exception):
    """An attempt failed in a way that may heal; `wait_seconds` is what the server asked for."""

    def __init__(self, reason: str, *, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class HopelessError(Exception):
    """An attempt failed in a way that asking again does not heal."""


@dataclass(frozen=True)
class Head:
    """An answer up to its body."""

    status: int
    headers: Mapping[str, str]  # of the last hop; they ignore case
    redirected: bool
    etag: str | None  # X-Linked-ETag of any hop, or the last one's ETag; without quotes and W/


class _Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> None:
        """None: requests would read a hop's body, however long, and prepare the next hop, even without following it."""


class Sessions:
    """Sessions of requests, lent to one receiver at a time so that connections are used again."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[requests.Session] = queue.LifoQueue()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[requests.Session]:
        """One that nobody else uses while the block runs."""
        try:
            session = self._idle.get_nowait()
        except queue.Empty:
            session = _Session()
            session.auth = _as_it_is  # a ~/.netrc must not replace the token, nor follow us to another host
        try:
            yield session
        finally:
            self._idle.put(session)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


class Answer:
    """Asks at once; `head()`, then `blocks()`; closing drops the rest. Raises HitchError, HopelessError or Stopped."""

    def __init__(
        self,
        sessions: Sessions,
        url: str,
        headers: Mapping[str, str],
        *,
        patience: Patience,
        stop: threading.Event,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._sessions = sessions
        self._url = url
        self._headers = headers
        self._patience = patience
        self._stop = stop
        self._block_bytes = block_bytes
        self._items: queue.Queue[Head | bytes | Exception | None] = queue.Queue(QUEUED_BLOCKS)
        self._closed = threading.Event()
        self._response: requests.Response | None = None
        self._waited_seconds = 0.0
        self._received_bytes = 0
        threading.Thread(target=self._receive, name="receive", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def head(self) -> Head:
        """Status and headers, when they are here."""
        head = self._next(self._patience.connect_seconds + self._patience.stall_seconds)
        assert isinstance(head, Head)
        return head

    def blocks(self) -> Iterator[bytes]:
        """The body as it comes, up to its end."""
        while isinstance(block := self._next(self._patience.stall_seconds), bytes):
            yield block

    def close(self) -> None:
        """Let the receiver end, also in the middle of the body."""
        self._closed.set()
        response = self._response
        if response is not None:
            with contextlib.suppress(ValueError, RuntimeError, OSError):  # it has ended, or is about to
                response.raw.shutdown()

    def _next(self, stall_seconds: float) -> Head | bytes | None:
        while True:
            if self._stop.is_set():
                raise Stopped
            begin = time.monotonic()
            try:
                item = self._items.get(timeout=min(POLL_SECONDS, stall_seconds))
            except queue.Empty:
                self._check_flow(begin, stall_seconds)
                continue
            if isinstance(item, Exception):
                raise item
            if isinstance(item, bytes):
                self._received_bytes += len(item)
                self._check_flow(begin, stall_seconds)
            return item

    def _check_flow(self, begin: float, stall_seconds: float) -> None:
        """Only time spent waiting for the line counts: a slow disk or a bound on the rate is not its fault."""
        self._waited_seconds += time.monotonic() - begin
        if self._waited_seconds < stall_seconds:
            return
        if self._received_bytes < LEAST_BYTES_PER_SECOND * self._waited_seconds:
            raise HitchError(f"the line stalls: {self._received_bytes} bytes in {self._waited_seconds:.0f} s")
        self._waited_seconds, self._received_bytes = 0.0, 0

    def _receive(self) -> None:
        try:
            with self._sessions.borrowed() as session:
                self._receive_from(session)
        except Exception as error:
            self._put(_meaning(error))

    def _receive_from(self, session: requests.Session) -> None:
        try:
            self._put(self._ask(session))
            assert self._response is not None
            raw = self._response.raw
            # read1 gives what is there, so that a trickle shows and a kill loses little
            while block := raw.read1(self._block_bytes, decode_content=False):
                if not self._put(block):
                    return
            self._put(None)
        finally:
            if self._response is not None:
                self._response.close()

    def _ask(self, session: requests.Session) -> Head:
        """Follow redirects by hand: a stop is heeded between them, and the token stays with the hub."""
        url, headers = self._url, {**self._headers, "Accept-Encoding": "identity"}
        linked: str | None = None
        for n_hops in range(MOST_HOPS + 1):
            response = self._response = session.get(
                url,
                headers=headers,
                stream=True,
                allow_redirects=False,
                timeout=(self._patience.connect_seconds, self._patience.stall_seconds),
            )
            linked = linked or response.headers.get("X-Linked-ETag")
            target = response.headers.get("Location") if response.status_code in _REDIRECTS else None
            if target is None:
                etag = linked or response.headers.get("ETag")
                return Head(response.status_code, response.headers, n_hops > 0, etag and _bare(etag))
            response.raw.read(_HOP_BYTES, decode_content=False)  # to its end, commonly: the connection lives on
            response.close()
            try:
                target = urllib.parse.urljoin(url, target)
                elsewhere = _origin(target) != _origin(url)
            except ValueError:
                raise HitchError(f"redirected to what is no URL: {target[:_LONGEST_WORDS]!r}") from None
            if elsewhere:
                headers = {name: v for name, v in headers.items() if name.lower() not in {"authorization", "cookie"}}
            url = target
        raise HitchError(f"redirected more than {MOST_HOPS} times")

    def _put(self, item: Head | bytes | Exception | None) -> bool:
        """False when nobody waits for it any more."""
        while not self._closed.is_set():
            try:
                self._items.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _bare(etag: str) -> str:
    return etag.strip().removeprefix("W/").strip('"')


def _meaning(error: Exception) -> Exception:
    """HitchError or HopelessError for what the libraries raise; anything else is a defect, and stays what it is."""
    if isinstance(error, requests.exceptions.InvalidHeader):  # its text would show the token
        return HopelessError("the token holds characters that no request can carry; look at HF_TOKEN")
    if isinstance(error, _NO_URL):
        return HopelessError(f"not a URL to fetch from: {error}")
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return HopelessError(f"the server's certificate is not trusted: {_words(error)}")
    if isinstance(error, _BROKEN):
        return HitchError(_words(error))
    return error


def _words(error: BaseException) -> str:
    """What went wrong, short: the libraries wrap errors in errors, and show signed URLs."""
    inner: object = error
    while isinstance(inner, BaseException):
        error = inner
        inner = getattr(error, "reason", None) or next((a for a in error.args if isinstance(a, BaseException)), None)
    return f"{type(error).__name__}: {str(error)[:_LONGEST_WORDS]}" if str(error) else type(error).__name__
