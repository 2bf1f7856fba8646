"""The files of a directory or a URI: none is passed over in silence, and none is read twice."""

from __future__ import annotations

import errno
import functools
import http.server
import io
import os
import socket
import struct
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from meshwright.data.errors import DataError, is_storage_fault
from meshwright.data.files import (
    Directory,
    FileEntry,
    RemoteDirectory,
    join_uri,
    matching_files,
    open_directory,
    split_uri,
)
from meshwright_local.nodeagent.network.ports import free_port


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that fail are not repeated for a minute."""
    monkeypatch.setattr("meshwright.data.remote_reads.PATIENCE_SECONDS", 0.0)


def names(directory: Directory) -> list[str]:
    return [entry.name for entry in directory.files()]


@contextmanager
def somebody() -> Iterator[None]:
    """Somebody whom permissions keep out, as they do not keep out root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def public() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


def test_directories_are_read_through_links_once(tmp_path: Path) -> None:
    """As Kubernetes projects a config map, and with a link to a directory that the link lies in."""
    (tmp_path / "..2026" / "sub").mkdir(parents=True)
    (tmp_path / "..2026" / "sub" / "a.txt").write_text("a")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "sub").symlink_to("..data/sub")
    (tmp_path / "..2026" / "sub" / "again").symlink_to(tmp_path)
    (tmp_path / "..2026" / "sub" / "itself").symlink_to(".")
    assert names(open_directory(str(tmp_path))) == ["sub/a.txt"]


def test_a_link_without_a_target_is_rejected_where_it_is_to_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.md").symlink_to("/nonexistent")
    directory = open_directory(str(tmp_path))
    assert [entry.name for entry in matching_files(directory, "*.txt")] == ["a.txt"]
    with pytest.raises(DataError, match=r"b\.md cannot be read: No such file.*; mount .*`data.pattern`"):
        list(matching_files(directory, "**/*"))


def test_a_directory_that_cannot_be_read_is_an_error(public: Path) -> None:
    (public / "a.txt").write_text("a")
    (public / "lost+found").mkdir(mode=0o000)
    with somebody():
        assert names(open_directory(str(public))) == ["a.txt"]
    (public / "no").mkdir(mode=0o000)
    with somebody(), pytest.raises(DataError, match=r"directory .*/no cannot be read \(Permission denied\): let uid"):
        open_directory(str(public)).files()


class Site(http.server.SimpleHTTPRequestHandler):
    """A list of links."""

    tells_sizes = True
    silent = "/nothing"
    """Requests for this path are not answered."""

    def do_GET(self) -> None:
        """See `BaseHTTPRequestHandler`."""
        if not self.path.startswith(self.silent):
            super().do_GET()
            return
        # Closed with bytes that nobody has read or without lingering, a connection is reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""

    def send_header(self, keyword: str, value: str) -> None:
        """See `BaseHTTPRequestHandler`."""
        if self.tells_sizes or keyword != "Content-Length":
            super().send_header(keyword, value)


@contextmanager
def served(root: Path, **options: bool | str) -> Iterator[str]:
    handler = type("Handler", (Site,), options)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(root))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_files_behind_links_of_a_page(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "sub" / "b.txt").write_text("b")
    links = ("?C=N;O=D", "../", "a.txt", "gone.md", "sub/")  # the first one is the same page in another order
    (tmp_path / "index.html").write_text("".join(f'<a href="{link}">{link}</a>' for link in links))
    with served(tmp_path) as site:
        directory = open_directory(site)
        found = list(matching_files(directory, "**/*.txt"))
        assert found == [FileEntry("a.txt", 5), FileEntry("sub/b.txt", 1)]
        assert all(entry.stamp for entry in found)
        with pytest.raises(DataError, match=r"^gone\.md cannot be read: `data.uri` lists it, but FileNotFoundError"):
            list(matching_files(directory, "**/*"))
        with pytest.raises(
            DataError, match=r"a\.txt` is a file: set the URI of its directory, and its name in `data.pattern`"
        ):
            open_directory(f"{site}/a.txt").files()
    says = r"^a\.txt cannot be read: `data.uri` does not report its size"
    with served(tmp_path, tells_sizes=False) as site, pytest.raises(DataError, match=says):
        list(matching_files(open_directory(site), "*.txt"))


def test_links_that_begin_at_the_page_are_not_hidden(tmp_path: Path) -> None:
    """As Caddy writes them."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("hello")
    (tmp_path / "index.html").write_text('<a href="./sub/">sub</a>')
    (tmp_path / "sub" / "index.html").write_text('<a href="./a.txt">a</a> <a href="./.git">git</a>')
    with served(tmp_path) as site:
        directory = open_directory(site)
        assert directory.files() == [FileEntry("sub/a.txt", 5)]
        assert directory.open("sub/a.txt").read() == b"hello"


def test_no_directory_behind_links_is_left_out_because_it_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "sub" / "b.txt").write_text("b")
    with (
        served(tmp_path, silent="/sub") as site,
        pytest.raises(DataError, match=r"^`data.uri: .*` cannot be listed: ") as error,
    ):
        open_directory(site).files()
    assert is_storage_fault(error.value)  # it may answer later
    (tmp_path / "index.html").write_text('<a href="a.txt">a</a> <a href="gone/">gone</a>')
    with served(tmp_path) as site, pytest.raises(DataError, match=r"cannot be listed: .*/gone/") as error:
        open_directory(site).files()
    assert not is_storage_fault(error.value)


def test_an_address_that_does_not_answer_is_not_an_empty_directory() -> None:
    with pytest.raises(DataError, match=r"^`data.uri: .*` cannot be listed: ") as error:
        open_directory(f"http://127.0.0.1:{free_port('127.0.0.1')}/text").files()
    assert is_storage_fault(error.value)


def test_an_archive_that_is_broken_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_text("not an archive")
    with pytest.raises(DataError, match="cannot be opened: File is not a zip file") as error:
        open_directory(f"zip://::file://{tmp_path}/a.zip")
    assert not is_storage_fault(error.value)


@pytest.mark.parametrize("uri", ["github://x", "zip://::file:///nonexistent.zip"])
def test_a_back_end_that_cannot_begin(uri: str) -> None:
    with pytest.raises(DataError, match=r"`data.uri: .*` cannot be opened"):
        open_directory(uri)


def test_a_uri_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"a\.txt` is a file: set the URI of its directory"):
        open_directory(f"local://{tmp_path}/a.txt").files()


def test_another_stamp_when_a_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old")
    places = (str(tmp_path), f"local://{tmp_path}")
    before = [open_directory(place).files() for place in places]
    file.write_text("new")
    os.utime(file, ns=(1, 1))
    for place, (entry,) in zip(places, before, strict=True):
        (now,) = open_directory(place).files()
        assert now == entry
        assert now.stamp != entry.stamp


@pytest.mark.parametrize(
    ("where", "together"),
    [
        ("/data", "/data/web"),
        ("/data/", "/data/web"),
        ("/da::ta", "/da::ta/web"),
        ("s3://bucket/text/", "s3://bucket/text/web"),
        ("memory://", "memory://web"),
        ("zip://::file:///z.zip", "zip://web::file:///z.zip"),
        ("zip://text::s3://bucket/z.zip", "zip://text/web::s3://bucket/z.zip"),
    ],
)
def test_paths_below(where: str, together: str) -> None:
    assert join_uri(where, "web") == together
    directory, name = split_uri(together)
    assert (join_uri(directory, name), name) == (together, "web")


def test_a_directory_inside_an_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("web/a.txt", "hello")
        archive.writestr("b.txt", "b")
    directory = open_directory(join_uri(f"zip://::file://{tmp_path}/z.zip", "web"))
    (entry,) = directory.files()
    assert entry == FileEntry("a.txt", 5)
    assert entry.stamp
    with directory.open("a.txt") as file:
        assert file.read() == b"hello"


def test_keys_that_differ_in_a_slash_are_two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store has no directories: `text//a.txt` is another key than `text/a.txt`."""
    keys = {"/keys/a.txt": b"one", "/keys//a.txt": b"other"}
    directory = RemoteDirectory("memory://keys")
    listed = {key: {"name": key, "size": len(content), "type": "file"} for key, content in keys.items()}
    monkeypatch.setattr(directory._files, "find", lambda *_, **__: listed)
    monkeypatch.setattr(directory._files, "open", lambda path, _: io.BytesIO(keys[path]))
    texts = [directory.open(name).read() for name in names(directory)]
    assert sorted(texts) == [b"one", b"other"]


@pytest.mark.parametrize(
    ("error", "temporary"),
    [
        (FileNotFoundError("gone"), False),
        (PermissionError("not yours"), False),
        (OSError(errno.EINVAL, "a name that cannot be"), False),
        (ValueError("no such bucket name"), False),
        (ImportError("install s3fs"), False),
        (ConnectionResetError("by the store"), True),
        (TimeoutError(), True),
        (OSError(errno.EIO, "i/o"), True),
        (RuntimeError("an error of a library's own"), True),
    ],
)
def test_an_error_of_a_store_is_temporary_unless_its_address_or_rights_are_wrong(
    error: Exception, temporary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.filesystem("memory").pipe("/answers/a.txt", b"text")
    directory = RemoteDirectory("memory://answers")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(directory._files, "find", fail)
    monkeypatch.setattr(directory._files, "open", fail)
    for request in (directory.files, lambda: directory.open("a.txt")):
        with pytest.raises(DataError, match="cannot be") as failed:
            request()
        assert is_storage_fault(failed.value) is temporary
