"""Reads over HTTP, from a server with faults: they are repeated, short ones are noticed, and none reads far ahead."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.api.data import DataFormat
from meshwright.data.errors import DataError, is_storage_fault
from meshwright.data.files import Directory, matching_files, open_directory
from meshwright.data.remote_reads import repeated
from meshwright.data.shards import TokenShards
from meshwright.data.tokenize import TextSource, tokenize
from meshwright.data.tokenizers import ByteTokenizer

TEXT = bytes(range(32, 127)) * 20_000
"""1.9 MB: more than a sample, less than what back ends read ahead."""
Fault = Callable[["Store"], bool]


class Store(http.server.BaseHTTPRequestHandler):
    """One file and a page with a link to it. Sends ranges of the file."""

    protocol_version = "HTTP/1.1"
    file: bytes
    sent: list[int]
    faults: list[Fault]
    """Each answers a request for the file in another way, or returns False."""
    ranges = True
    url: str

    def do_HEAD(self) -> None:
        """See `BaseHTTPRequestHandler`."""
        self.do_GET()

    def do_GET(self) -> None:
        """See `BaseHTTPRequestHandler`."""
        if self.path == "/":
            self.answer(200, b'<a href="a.txt">a.txt</a>', {"Content-Type": "text/html"})
        elif self.path != "/a.txt":
            self.answer(404)
        elif not any(fault(self) for fault in self.faults):
            self.send_file()

    def send_file(self, size: int | None = None) -> None:
        """Send the file or a range, of which a body has only the first `size` bytes."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not self.ranges:
            self.answer(200, self.file)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(self.file) - 1)
        content = self.file[first : last + 1][:size]
        self.answer(206, content, {"Content-Range": f"bytes {first}-{first + len(content) - 1}/{len(self.file)}"})

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Answer a request."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.sent.append(len(body))
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


class Quiet(http.server.ThreadingHTTPServer):
    """A server whose clients may leave."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing."""


@pytest.fixture
def store() -> Iterator[type[Store]]:
    """A server of its own, whose attributes a test changes."""

    class Own(Store):
        file, sent, faults = TEXT, list[int](), list[Fault]()

    with Quiet(("127.0.0.1", 0), Own) as server:
        Own.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield Own
        finally:
            server.shutdown()
            thread.join()


def first_times(count: int, fault: Callable[[Store], None]) -> Fault:
    """The first requests for content meet a fault, the next ones do not."""
    left = [count]

    def meets(request: Store) -> bool:
        if request.command == "HEAD" or left[0] == 0:
            return False
        left[0] -= 1
        fault(request)
        return True

    return meets


def refused(status: int) -> Fault:
    def meets(request: Store) -> bool:
        request.answer(status)
        return True

    return meets


def busy(request: Store) -> None:
    request.answer(503)


def cut(request: Store) -> None:
    request.answer(206, TEXT[:10], {"Content-Length": "1000"})
    request.close_connection = True


def short(request: Store) -> None:
    request.send_file(size=7)


def opened(store: type[Store]) -> Directory:
    return open_directory(store.url)


def test_a_sample_loads_its_own_bytes_only(store: type[Store]) -> None:
    directory = opened(store)
    store.sent.clear()
    assert directory.read("a.txt", 1000, 64) == TEXT[1000:1064]
    assert store.sent == [64]


def test_a_shard_loads_what_it_verifies_and_what_it_needs(store: type[Store], tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(TEXT)
    tokenize(TextSource(open_directory(str(tmp_path / "text"))), ByteTokenizer(), tmp_path / "tokens")
    shards = TokenShards(open_directory(str(tmp_path / "tokens")))
    store.file = (tmp_path / "tokens" / "00000.tokens").read_bytes()
    directory = opened(store)
    shards._directory = type(
        "Renamed",
        (),
        {  # the server has one file
            "local": lambda self, name: None,
            "read": lambda self, name, offset, length: directory.read("a.txt", offset, length),
        },
    )()
    for _ in range(2):
        assert bytes(shards.tokens(0, 64).astype("uint8")) == TEXT[:64]
    assert store.sent == [1 << 20, 128, 128]


@pytest.mark.parametrize("fault", [busy, cut, short])
def test_a_read_that_fails_is_repeated(store: type[Store], fault: Callable[[Store], None]) -> None:
    store.faults = [first_times(2, fault)]
    assert opened(store).read("a.txt", 500, 100) == TEXT[500:600]


@pytest.mark.parametrize("fault", [busy, cut, short])
def test_no_document_is_cut_where_a_read_fails(
    store: type[Store], tmp_path: Path, fault: Callable[[Store], None]
) -> None:
    store.faults = [first_times(1, fault)]
    manifest, _ = tokenize(TextSource(opened(store)), ByteTokenizer(), tmp_path / "tokens")
    assert manifest.tokens == len(TEXT) + 1


def test_a_store_that_stays_away_is_named(store: type[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.data.remote_reads.PATIENCE_SECONDS", 0.0)
    directory = opened(store)
    store.faults = [first_times(99, short)]
    with pytest.raises(DataError, match=r"/a\.txt cannot be read: the server sent 7 of the 100 bytes") as error:
        directory.read("a.txt", 500, 100)
    assert is_storage_fault(error.value)


@pytest.mark.parametrize(("status", "temporary"), [(503, True), (429, True), (403, False), (404, False)])
def test_whether_an_answer_may_be_another_one_later(
    store: type[Store], monkeypatch: pytest.MonkeyPatch, status: int, temporary: bool
) -> None:
    """For fsspec each answer to a question for a size is that there is no such file."""
    monkeypatch.setattr("meshwright.data.remote_reads.PATIENCE_SECONDS", 0.0)
    directory = opened(store)
    store.faults = [refused(status)]
    for request in (lambda: list(matching_files(directory, "**/*")), lambda: directory.open("a.txt")):
        with pytest.raises(DataError, match=r"cannot be read") as error:
            request()
        assert is_storage_fault(error.value) is temporary


def test_a_password_in_a_uri_is_in_no_message(
    store: type[Store], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("meshwright.data.remote_reads.PATIENCE_SECONDS", 1.0)
    directory = open_directory(store.url.replace("://", "://me:secret@"))
    assert [entry.name for entry in directory.files()] == ["a.txt"]
    store.faults = [refused(503)]
    with pytest.raises(DataError, match=r"http://me:\*\*\*@.*/a\.txt cannot be read") as error:
        directory.read("a.txt", 500, 100)
    assert caplog.records, "that it is tried again is in the log"
    assert "secret" not in f"{error.value}{caplog.text}"


def test_a_server_without_ranges_is_no_place_for_samples(store: type[Store]) -> None:
    store.ranges = False
    with pytest.raises(DataError, match=r"does not send parts of a file .*: copy the files to a volume") as error:
        opened(store).read("a.txt", 500, 100)
    assert not is_storage_fault(error.value)


def test_a_server_says_when_to_come_again() -> None:
    waited: list[float] = []

    class BusyError(RuntimeError):
        status, request_info, headers = 503, None, {"Retry-After": "3"}

    def answer() -> str:
        if not waited:
            raise BusyError
        return "text"

    assert repeated(answer, "a.txt cannot be read", sleep=waited.append) == "text"
    assert waited == [3.0]
    BusyError.headers = {"Retry-After": "3600"}
    waited.clear()
    with pytest.raises(DataError, match="a.txt cannot be read: BusyError") as error:
        repeated(answer, "a.txt cannot be read", sleep=waited.append)
    assert is_storage_fault(error.value)
    assert not waited


@pytest.mark.parametrize("fault", [busy, cut, short])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_long_text_is_loaded_again(
    store: type[Store], tmp_path: Path, fault: Callable[[Store], None], ranges: bool
) -> None:
    """fsspec loads a file of more than 5 MB in one request if it is asked for all of it."""
    store.file, store.ranges = TEXT * 4, ranges
    source = TextSource(opened(store))
    source.files()
    store.faults = [first_times(1, fault)]
    manifest, _ = tokenize(source, ByteTokenizer(), tmp_path / "tokens")
    assert manifest.tokens == len(store.file) + 1


def test_lines_over_http(store: type[Store], tmp_path: Path) -> None:
    store.file = b"".join(json.dumps({"text": str(number)}).encode() + b"\n" for number in range(1000))
    store.faults = [first_times(1, busy)]
    source = TextSource(opened(store), kind=DataFormat.JSON_LINES)
    assert tokenize(source, ByteTokenizer(), tmp_path / "tokens")[0].documents == 1000
