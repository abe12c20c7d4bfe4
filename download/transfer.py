"""Bytes from a server that may fail in the middle: asked for again until they are here, or patience ends."""

from __future__ import annotations

import datetime
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from container.errors import HubError, TransferError
from container.progress import duration
from download.answer import BLOCK_BYTES, Answer, Head, HitchError, HopelessError, Sessions, Stopped
from download.ranges import MisplacedError, Wanted, accepted
from download.rate import RateLimit
from download.retry import Patience, Step, delay_seconds, judge, retry_after_seconds

__all__ = ["Patience", "Sink", "Stopped", "Transfer", "Wanted"]

# A server that can neither continue a file nor send it in one go is given up at last.
MOST_RESTARTS = 20


class Sink(Protocol):
    """Where the bytes of a range go, in order."""

    @property
    def have(self) -> int:
        """So many are here."""

    @property
    def etag(self) -> str | None:
        """Of the answer that they came from."""

    def begin(self, etag: str | None) -> None:
        """An answer that continues what is here has come."""

    def take(self, block: bytes) -> None:
        """Keep the next bytes."""

    def restart(self) -> None:
        """Forget what is here."""


class Memory:
    """A range of a file that is kept in memory; `progress` is told how many bytes are here."""

    def __init__(self, progress: Callable[[int], None] | None = None) -> None:
        self.data = bytearray()
        self._progress = progress
        self.etag: str | None = None
        self.have = 0

    def begin(self, etag: str | None) -> None:
        """Remember where the bytes come from."""
        self.etag = etag

    def take(self, block: bytes) -> None:
        """Keep the next bytes."""
        self.data += block
        self.have = len(self.data)
        if self._progress is not None:
            self._progress(self.have)

    def restart(self) -> None:
        """Forget all."""
        self.data.clear()
        self.have = 0


class Transfer:
    """What all transfers of a run share: connections, patience, a bound on the rate, and the order to stop.

    `headers` gives what the hub wants to see with each request (a token); other hosts are not shown it. Once `stop` is
    set, every call raises Stopped, within a second.
    """

    def __init__(
        self,
        *,
        headers: Callable[[], Mapping[str, str]],
        patience: Patience | None = None,
        max_bytes_per_second: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.stop = threading.Event()
        self.hitches: dict[str, str] = {}  # what is being asked for again → why; for whoever shows progress
        self.patience = patience or Patience()
        self._headers = headers
        self._rate = None if max_bytes_per_second is None else RateLimit(max_bytes_per_second)
        self._random = random.Random(seed)
        self._sessions = Sessions()

    def close(self) -> None:
        """Close the connections."""
        self._sessions.close()

    def wait(self, seconds: float) -> None:
        """Sleep, or raise Stopped."""
        if self.stop.wait(seconds):
            raise Stopped

    def read_range(
        self, url: str, start: int, n_bytes: int | None, what: str, progress: Callable[[int], None] | None = None
    ) -> bytes:
        """Bytes of a file, `n_bytes` None for all from `start`; `what` names it in messages, `progress` is told how
        many have come. Give `n_bytes` where it is known: without it, a cut shows only if the server tells a length.

        Raises HubError, TransferError or Stopped.
        """
        if n_bytes == 0:
            return b""
        memory = Memory(progress)
        self.pull(url, Wanted(start=start, n_bytes=n_bytes), memory, what)
        return bytes(memory.data)

    def pull(self, url: str, wanted: Wanted, sink: Sink, what: str) -> None:
        """Ask until the sink has all wanted bytes; what it has already is not asked for. Raises as `read_range` does,
        and what the sink raises.
        """
        attempts = _Attempts(self, what)
        while not wanted.complete(sink.have):
            try:
                self._attempt(url, wanted, sink, attempts)
            except MisplacedError as hitch:
                attempts.restarted(str(hitch))
                sink.restart()
                attempts.failed(hitch, sink.have)
            except HitchError as hitch:
                attempts.failed(hitch, sink.have)
            except HopelessError as error:
                raise HubError(f"{what}: {error}") from None
            else:
                return

    def _attempt(self, url: str, wanted: Wanted, sink: Sink, attempts: _Attempts) -> None:
        headers = {**self._headers(), **wanted.header(sink.have)}
        block_bytes = BLOCK_BYTES if self._rate is None else min(BLOCK_BYTES, self._rate.step_bytes)
        with Answer(
            self._sessions, url, headers, patience=self.patience, stop=self.stop, block_bytes=block_bytes
        ) as answer:
            head = answer.head()
            self._check(head)
            offset, n_bytes = accepted(wanted, sink.have, sink.etag, head)
            if offset < wanted.start + sink.have:
                attempts.restarted("the server sends the whole file where its rest was asked for")
                sink.restart()
            sink.begin(head.etag)
            whole = head.status == 200 and wanted.end is not None and wanted.total is None
            self._keep(answer, sink, n_bytes, attempts, surplus_is_fine=whole)

    def _keep(
        self, answer: Answer, sink: Sink, n_bytes: int | None, attempts: _Attempts, *, surplus_is_fine: bool
    ) -> None:
        """Take `n_bytes` of the body, or all of it."""
        left = n_bytes
        for block in answer.blocks():
            if left is not None and len(block) > left:
                if not surplus_is_fine:
                    raise HitchError("the server sends more bytes than were asked for")
                block = block[:left]
            sink.take(block)
            attempts.progressed()
            if self._rate is not None:
                self.wait(self._rate.take(len(block)))
            if left is not None:
                left -= len(block)
                if not left and surplus_is_fine:
                    return
        if left:
            raise HitchError(f"the line was cut with {left} bytes missing")

    def _check(self, head: Head) -> None:
        if head.status == 416:
            raise MisplacedError("HTTP 416: the server's file has no bytes there")
        verdict = judge(head.status, redirected=head.redirected, headers=head.headers)
        if verdict.step is Step.REFUSE:
            raise HopelessError(verdict.reason)
        if verdict.step is not Step.GO_ON:
            asked = head.headers.get("Retry-After")
            now = datetime.datetime.now(datetime.UTC)
            raise HitchError(verdict.reason, wait_seconds=retry_after_seconds(asked, now, self.patience))

    def jitter(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        return delay_seconds(failures, self.patience, self._random)


class _Attempts:
    """Counts what fails while one thing is fetched, waits in between, and ends it when patience does."""

    def __init__(self, transfer: Transfer, what: str) -> None:
        self._transfer = transfer
        self._what = what
        self._failures = 0
        self._restarts = 0
        self._last_new = time.monotonic()

    def progressed(self) -> None:
        """A new byte has come."""
        self._failures = 0
        self._last_new = time.monotonic()
        self._transfer.hitches.pop(self._what, None)

    def restarted(self, reason: str) -> None:
        """It begins anew. Raises TransferError when it has too often."""
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise TransferError(
                f"{self._what}: begun anew {MOST_RESTARTS} times, and again the server cannot continue it: {reason}; "
                "try again later, or look whether a proxy is in the way"
            )

    def failed(self, hitch: HitchError, have: int) -> None:
        """Wait before the next attempt. Raises TransferError when nothing new has come for too long."""
        self._failures += 1
        self._transfer.hitches[self._what] = str(hitch)
        silent = time.monotonic() - self._last_new
        if silent >= self._transfer.patience.give_up_seconds:
            raise TransferError(
                f"{self._what}: {have} bytes are here, and no more have come for {duration(silent)}; "
                f"the last failure: {hitch}; run the same command to continue"
            )
        self._transfer.wait(max(hitch.wait_seconds + self._transfer.jitter(1), self._transfer.jitter(self._failures)))
