"""Sends the body of a reply over one connection, with its cuts, stalls and wrong bytes."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.hub.replies import Framing, Reply
from tests.hub.repositories import RepoFile

_SENDFILE_BYTES = 4 * 2**20
_THROTTLE_PIECES_PER_SECOND = 50
_LOOK_SECONDS = 0.05


class ClientGoneError(Exception):
    """The other end closed the connection, or the server is closing."""


class Sender:
    """One connection's way out.

    Args:
        count: Called with the length of each piece of a body once it is handed to the kernel.
        bytes_per_second: Rate of bodies, None for no bound.
        closing: Ends every wait when set.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        count: Callable[[int], None],
        bytes_per_second: int | None,
        closing: threading.Event,
    ) -> None:
        self._connection = connection
        self._count = count
        self._rate = bytes_per_second
        self._closing = closing
        self._began = time.monotonic()
        self._body_bytes = 0

    def wait(self, seconds: float | None) -> None:
        """Send nothing for a while, or (None) until the client goes away.

        Raises:
            ClientGoneError: It did, or the server is closing.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._closing.is_set():
            left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
            if left <= 0:
                return
            readable, _, _ = select.select([self._connection], [], [], left)
            if readable and not self._connection.recv(1, socket.MSG_PEEK):
                break
            if readable:
                self._closing.wait(left)  # bytes of a next request are no reason to spin
        raise ClientGoneError

    def send_body(self, reply: Reply) -> None:
        """Send the body up to `reply.cut_at`, stalled, flipped and framed as the reply says."""
        if reply.file is None:
            return
        n_bytes = reply.n_bytes if reply.cut_at is None else min(reply.n_bytes, reply.cut_at)
        stop = reply.start + n_bytes
        stalls = reply.stall_at is not None and reply.stall_at >= 0
        pause = reply.start + min(reply.stall_at or 0, n_bytes) if stalls else stop
        chunked = reply.framing is Framing.CHUNKED and reply.n_bytes > 0
        if chunked:  # one chunk for all: any cut is then a cut in the middle of a chunk
            self._connection.sendall(f"{reply.n_bytes:x}\r\n".encode())
        self._send_span(reply.file, reply.start, pause, reply.flip_offset)
        if stalls:
            self.wait(reply.stall_seconds)
        self._send_span(reply.file, pause, stop, reply.flip_offset)
        if reply.cut_at is not None:
            return
        if reply.surplus:
            self._send(memoryview(reply.surplus))
        if reply.framing is Framing.CHUNKED:
            self._connection.sendall(b"\r\n0\r\n\r\n" if chunked else b"0\r\n\r\n")

    def _send_span(self, file: RepoFile, start: int, stop: int, flip_offset: int | None) -> None:
        if flip_offset is not None and start <= flip_offset < stop:
            self._send_span(file, start, flip_offset, None)
            right = b"".join(file.pieces(flip_offset, flip_offset + 1))
            self._send(memoryview(bytes([right[0] ^ 0xFF])))
            start = flip_offset + 1
        if isinstance(file.content, Path):
            self._send_from_disk(file.content, start, stop)
        else:
            self._send(memoryview(file.content)[start:stop])

    def _send_from_disk(self, path: Path, start: int, stop: int) -> None:
        with path.open("rb") as stream:
            while start < stop:
                n_bytes = min(self._step_bytes(), stop - start)
                sent = os.sendfile(self._connection.fileno(), stream.fileno(), start, n_bytes)
                if sent == 0:
                    raise EOFError(
                        f"{path} is shorter than when it was added to the repository: {start} < {stop} bytes"
                    )
                start += sent
                self._sent(sent)

    def _send(self, content: memoryview) -> None:
        for offset in range(0, len(content), self._step_bytes()):
            piece = content[offset : offset + self._step_bytes()]
            self._connection.sendall(piece)
            self._sent(len(piece))

    def _step_bytes(self) -> int:
        return _SENDFILE_BYTES if self._rate is None else max(1, self._rate // _THROTTLE_PIECES_PER_SECOND)

    def _sent(self, n_bytes: int) -> None:
        self._count(n_bytes)
        self._body_bytes += n_bytes
        if self._rate is not None:
            ahead = self._body_bytes / self._rate - (time.monotonic() - self._began)
            if ahead > 0 and self._closing.wait(ahead):
                raise ClientGoneError
