"""The loopback hub: a threaded HTTP/1.1 server that records every request and misbehaves by schedule."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.hub.faults import FaultSchedule, Kind, Part
from tests.hub.listener import Connection, Listener
from tests.hub.misbehave import apply
from tests.hub.replies import Asked
from tests.hub.repositories import LFS_THRESHOLD_BYTES, Content, Repository
from tests.hub.routes import Router, SignedUrls
from tests.hub.wire import Sender

_HOST = "127.0.0.1"
_SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class Request:
    """One request and what became of it.

    Attributes:
        path: Request target without its query.
        part, name: What was asked; the name is "" for listings and unknown paths.
        range_start, range_stop: As asked (`stop` one past the end); None where absent or open.
        status: As sent; 0 where the connection closed before the status line.
        bytes_sent: Body bytes handed to the kernel.
        fault: What was made to go wrong, None if nothing.
    """

    method: str
    path: str
    part: Part
    name: str
    range_start: int | None
    range_stop: int | None
    had_authorization: bool
    status: int
    bytes_sent: int
    fault: Kind | None


class HubServer:
    """A model hub on loopback. Use as a context manager; repositories may be added and changed while it runs.

    Args:
        faults: What goes wrong; may be replaced by `set_faults` later.
        bytes_per_second: Rate of each connection's bodies, in small pieces; None for as fast as it goes (sendfile).
        url_uses: How often each signed URL works; None for any number.
        url_seconds: How long each signed URL works; None for an hour.
        port: 0 for one that is free.

    Attributes:
        on_request: Called with part and name before each answer is made, say to move main just then.
    """

    def __init__(
        self,
        faults: FaultSchedule | None = None,
        *,
        bytes_per_second: int | None = None,
        url_uses: int | None = None,
        url_seconds: float | None = None,
        port: int = 0,
    ) -> None:
        self._faults = faults if faults is not None else FaultSchedule()
        self._bytes_per_second = bytes_per_second
        self._repositories: dict[str, Repository] = {}
        self._aliases: dict[str, str] = {}
        self._tokens: dict[str, frozenset[str]] = {}
        self._signed = SignedUrls(uses=url_uses, seconds=url_seconds)
        self._changed = threading.Condition()
        self._n_active = 0
        self._n_begun = 0
        self._finished: list[tuple[int, Request]] = []  # with their numbers
        self._n_seen: Counter[tuple[Part, str]] = Counter()
        self._n_part_seen: Counter[Part] = Counter()
        self._sent: Counter[str] = Counter()
        self._closing = threading.Event()
        self.on_request: Callable[[Part, str], None] | None = None
        self._http = Listener((_HOST, port), self._answer)
        self._router = Router(self._repositories, self._aliases, self._tokens, self._signed, self.cdn_endpoint)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), name="hub", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, break every connection, and wait for all threads."""
        self._closing.set()
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT would be."""
        return f"http://{_HOST}:{self.port}"

    @property
    def cdn_endpoint(self) -> str:
        """Where signed URLs point: the same server under another host name, so that clients drop their token."""
        return f"http://localhost:{self.port}"

    def add(
        self,
        repo_id: str,
        files: Mapping[str, Content] | Path,
        *,
        private: bool = False,
        gated: bool = False,
        lfs_threshold_bytes: int = LFS_THRESHOLD_BYTES,
    ) -> Repository:
        """Serve a folder, or name → bytes or path, as `repo_id` with one commit on main."""
        repository = Repository(repo_id, private=private, gated=gated, lfs_threshold_bytes=lfs_threshold_bytes)
        repository.commit(files)
        self._repositories[repo_id] = repository
        return repository

    def alias(self, old_id: str, new_id: str) -> None:
        """Redirect a renamed repository's old name."""
        self._aliases[old_id] = new_id

    def allow(self, token: str, *gated: str) -> None:
        """Accept a token: it sees private repositories, and the contents of the gated ones named ("*": all)."""
        self._tokens[token] = frozenset(gated)

    def set_faults(self, faults: FaultSchedule) -> None:
        """Another schedule from now on, with all request counts at 0."""
        with self._changed:
            self._faults = faults
            self._n_seen.clear()
            self._n_part_seen.clear()

    def set_rate(self, bytes_per_second: int | None) -> None:
        """Another rate for the requests from now on."""
        self._bytes_per_second = bytes_per_second

    def expire_urls(self) -> None:
        """Let every signed URL given out so far answer 403."""
        self._signed.expire()

    @property
    def requests(self) -> list[Request]:
        """Every finished request, in the order they began. Waits up to 2 s for those in hand to end.

        Not in the order they ended: a client has an answer before the thread that sent it comes to note it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._n_active == 0, _SETTLE_SECONDS)
            return [one for _, one in sorted(self._finished, key=lambda numbered: numbered[0])]

    def of(self, name: str, part: Part | None = None) -> list[Request]:
        """The requests of one file (of one part)."""
        return [one for one in self.requests if one.name == name and part in (None, one.part)]

    def clear(self) -> None:
        """Forget the requests so far (request counts of the faults stay)."""
        with self._changed:
            self._changed.wait_for(lambda: self._n_active == 0, _SETTLE_SECONDS)
            self._finished.clear()
            self._sent.clear()

    def bytes_sent(self, name: str) -> int:
        """Bytes of a file sent so far (not of redirects and errors), running answers included; never waits."""
        with self._changed:
            return self._sent[name]

    def wait_until_sent(self, name: str, n_bytes: int, seconds: float = 10.0) -> bool:
        """Wait until that many bytes of a file have gone out; False if they have not within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._sent[name] >= n_bytes, seconds)

    @contextlib.contextmanager
    def _in_hand(self) -> Iterator[list[Request]]:
        """Count a request as active until its record, left in the list, is filed."""
        filed: list[Request] = []
        with self._changed:
            self._n_active += 1
            number = self._n_begun = self._n_begun + 1
        try:
            yield filed
        finally:
            with self._changed:
                self._finished.extend((number, one) for one in filed)
                self._n_active -= 1
                self._changed.notify_all()

    def _count(self, name: str, n_bytes: int) -> None:
        with self._changed:
            self._sent[name] += n_bytes
            self._changed.notify_all()

    def _answer(self, connection: Connection, asked: Asked) -> None:
        """Answer one request on its connection and record it."""
        with self._in_hand() as filed:
            route = self._router.route(asked.path)
            with self._changed:
                key = (route.part, route.name)
                fault = self._faults.fault_for(*key, self._n_seen[key], self._n_part_seen[route.part])
                self._n_seen[key] += 1
                self._n_part_seen[route.part] += 1
            if self.on_request is not None:
                self.on_request(route.part, route.name)
            if fault is not None and fault.kind is Kind.EXPIRE:
                self._signed.expire(route.signature)
            reply = route.answer(asked)
            if fault is not None:
                reply = apply(fault, reply, asked, route.part)
            sent = [0]
            own = reply.file.name if reply.file is not None else ""  # "" for an error's or a redirect's words

            def count(n_bytes: int) -> None:
                sent[0] += n_bytes
                self._count(own, n_bytes)

            rate = self._bytes_per_second if reply.bytes_per_second is None else reply.bytes_per_second
            sender = Sender(connection.connection, count=count, bytes_per_second=rate, closing=self._closing)
            status = connection.send_reply(reply, asked, sender)
            first, last = asked.range or (None, None)
            filed.append(
                Request(
                    method=asked.method,
                    path=asked.path.partition("?")[0],
                    part=route.part,
                    name=route.name,
                    range_start=first,
                    range_stop=None if last is None else last + 1,
                    had_authorization="Authorization" in connection.headers,
                    status=status,
                    bytes_sent=sent[0],
                    fault=fault.kind if fault is not None else None,
                )
            )
