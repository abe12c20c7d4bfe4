"""The HTTP side of the loopback hub: connections, and the listener that owns them."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.hub.replies import Asked, Framing, Reply
from tests.hub.wire import ClientGoneError, Sender


class Connection(BaseHTTPRequestHandler):
    """One connection: reads requests, lets the listener's `answer` decide, sends what `send_reply` is given."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listener

    def do_GET(self) -> None:
        bearer = self.headers.get("Authorization", "").partition("Bearer ")[2]
        asked = Asked(
            method=self.command,
            path=self.path,
            range_header=self.headers.get("Range"),
            if_range=self.headers.get("If-Range"),
            token=bearer or None,
        )
        self.server.answer(self, asked)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_reply(self, reply: Reply, asked: Asked, sender: Sender) -> int:
        """Send headers and body; returns the status that went out, 0 for none."""
        status = 0
        try:
            if reply.stall_at == -1:
                sender.wait(reply.stall_seconds)
            if reply.cut_at != -1:
                self._send_headers(reply)
                status = reply.status
                if asked.method != "HEAD":
                    sender.send_body(reply)
        except (ClientGoneError, ConnectionError):
            self.close_connection = True
        if reply.cut_at is not None:
            self.close_connection = True
            if reply.reset:
                self._reset()
        return status

    def _send_headers(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.framing is Framing.LENGTH:
            declared = reply.n_bytes if reply.declared_bytes is None else reply.declared_bytes
            self.send_header("Content-Length", str(declared))
        elif reply.framing is Framing.CHUNKED:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
        self.end_headers()

    def _reset(self) -> None:
        """Make the close that follows an RST."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.server.resets.add(self.connection)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: the records are the log."""


class Listener(ThreadingHTTPServer):
    """Keeps hold of its threads and connections, so that closing it leaves neither."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], answer: Callable[[Connection, Asked], None]) -> None:
        super().__init__(address, Connection)
        self.answer = answer
        self.resets: set[socket.socket] = set()
        self._open: set[socket.socket] = set()
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def server_bind(self) -> None:
        # HTTPServer.server_bind looks the host's name up, which can take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), name="hub-connection", daemon=True
        )
        with self._lock:
            self._open.add(request)
            self._workers = [one for one in self._workers if one.is_alive()] + [thread]
            thread.start()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
            if request in self.resets:
                self.resets.discard(request)
                request.close()  # without the FIN that shutdown() would send first
                return
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away between requests is no error; anything else is a defect of this server and shows."""
        if not isinstance(sys.exception(), ConnectionError):
            raise

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._workers:
            thread.join()
