"""An HTTP proxy in front of an object store, with faults: answers 500 and 503, silence, a cut connection."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

KINDS = ("500", "503", "time-out", "cut before", "cut after")
"""`cut before` closes the connection instead of forwarding the request; `cut after` once the store has done it."""
_HOP = {"connection", "transfer-encoding", "content-length", "server", "date"}


class FaultProxy:
    """Forwards to `target`. A seeded share of the requests meets a fault, of each kind in turn."""

    def __init__(self, target: str, *, seed: int = 0, share: float = 0.0, silence_seconds: float = 4.0) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 80)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.share = share
        self.kinds: tuple[str, ...] = KINDS
        self.silence_seconds = silence_seconds
        self.faults: Counter[str] = Counter()
        proxy = self

        class Handler(_Handler):
            def do(self) -> None:
                proxy._serve(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _fault(self) -> str:
        with self._lock:
            if self._random.random() >= self.share:
                return ""
            kind = self.kinds[self.faults.total() % len(self.kinds)]
            self.faults[kind] += 1
            return kind

    def _serve(self, request: Any) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        fault = self._fault()
        if fault in ("500", "503"):
            code = "InternalError" if fault == "500" else "SlowDown"
            answer = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>fault</Message></Error>".encode()
            request.answer(int(fault), [("Content-Type", "application/xml")], answer)
            return
        if fault == "time-out":
            time.sleep(self.silence_seconds)
        if fault in ("time-out", "cut before"):
            request.cut()
            return
        connection = http.client.HTTPConnection(*self._target, timeout=60)
        connection.request(request.command, request.path, body, dict(request.headers.items()))
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if fault == "cut after":
            request.cut()
            return
        length = response.headers.get("Content-Length") if request.command == "HEAD" else None
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP]
        request.answer(response.status, headers, content, length)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: str | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def cut(self) -> None:
        self.close_connection = True
        self.connection.close()

    def log_message(self, *args: Any) -> None:
        """Nothing: a test's output is its own."""
