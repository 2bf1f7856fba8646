"""A container's own view of the file system, created only with mount(2), unshare(2) and chroot(2).

The view is an overlay: its lower layer is the machine's root, its upper layer a tmpfs, so mount points can be created
anywhere and nothing stays on the machine. The machine's other file systems are mounted on it, then the container's
volumes, each at its `mountPath`. If the container's image has its own root directory, that is the lower layer, and of
the machine's file systems there are only /dev, /proc and /sys, as in a container. Everything belongs to a mount
namespace of the container's processes, which the kernel removes with the last of them. A UTS namespace gives the
container its pod's host name. Files of the lower layer share the machine's page cache, so programs start as fast as
outside. This requires CAP_SYS_ADMIN.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

_NEWNS, _NEWUTS = 0x00020000, 0x04000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_MOST_LINKS = 40
_LIBC = ctypes.CDLL(None, use_errno=True)


class Mount(NamedTuple):
    """A file or directory of the machine, and its path in the container."""

    source: str
    target: str
    read_only: bool = False


class FileSystemView(NamedTuple):
    """A container's view. It is mounted on `root`, an empty directory that stays empty for other processes."""

    root: str
    hostname: str
    mounts: Sequence[Mount]
    image: str = ""
    """Root directory of the image. Empty: that of the machine."""


_SYSTEM = ("/dev", "/proc", "/sys")
_SYSTEM_FILES = ("/etc/resolv.conf",)
"""What container runtimes mount, whatever the image has."""


def enter(view: FileSystemView) -> None:
    """Make the view the root of the calling process.

    Raises:
        OSError: It is not permitted, or a mount failed; `filename` is its path.
    """
    _check(_LIBC.unshare(_NEWNS | _NEWUTS), "unshare")
    socket.sethostname(view.hostname)
    _mount(None, "/", flags=_REC | _PRIVATE)
    # Links such as /var/run must be resolved inside the view.
    mounts = [
        Mount(source, _resolved(view.image or "/", target), read_only) for source, target, read_only in view.mounts
    ]
    points = _mount_points()
    _mount("tmpfs", view.root, "tmpfs", data="mode=755")
    merged = f"{view.root}/view"
    os.mkdir(merged)
    if view.image:
        _mount_image(view, merged, mounts, points)
    else:
        _mount_machine(view, merged, mounts, points)
    for source, target, read_only in sorted(mounts, key=lambda mount: mount.target.count("/")):
        place = merged + target
        if os.path.isdir(source):
            os.makedirs(place, exist_ok=True)
        elif not os.path.lexists(place):
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.mknod(place)
        _mount(source, place, flags=_BIND | _REC)
        if read_only:
            _mount(None, place, flags=_BIND | _REMOUNT | _RDONLY)
    os.chroot(merged)
    os.chdir("/")


def _mount_image(view: FileSystemView, merged: str, mounts: Sequence[Mount], points: Sequence[str]) -> None:
    """Mount the image's root, and on it what every container has of the machine."""
    lower, upper, work = (f"{view.root}/{name}" for name in ("lower", "upper", "work"))
    for directory in (lower, upper, work):
        os.mkdir(directory)
    # The colon in the name of an image would separate two layers.
    _mount(view.image, lower, flags=_BIND)
    _mount("overlay", merged, "overlay", data=f"lowerdir={lower},upperdir={upper},workdir={work}")
    for path in _SYSTEM:
        place = merged + _resolved(view.image, path)
        os.makedirs(place, exist_ok=True)
        if not _gets_new_paths(path, mounts):
            _mount(path, place, flags=_BIND | _REC)
            continue
        # Mount points such as /dev/termination-log must not appear on the machine.
        _mount_overlay(view, path, place)
        for point in (point for point in points if point.startswith(path + "/")):
            _mount(point, merged + point, flags=_BIND, optional=True)
    for path in (path for path in _SYSTEM_FILES if os.path.exists(path)):
        place = merged + _resolved(view.image, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if not os.path.lexists(place):
            os.mknod(place)
        _mount(path, place, flags=_BIND)


def _mount_points() -> list[str]:
    """The directories of the machine on which file systems are mounted, each once."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        return list(dict.fromkeys(line.split()[4].encode().decode("unicode_escape") for line in file))


def _mount_machine(view: FileSystemView, merged: str, mounts: Sequence[Mount], points: Sequence[str]) -> None:
    """Mount the machine's root and its other file systems."""
    for point in points:
        if point == "/" or _gets_new_paths(point, mounts):
            _mount_overlay(view, point, merged + point)
        else:
            # A file system that is hidden below another cannot be mounted, and is not visible anyway.
            _mount(point, merged + point, flags=_BIND, optional=True)


def _gets_new_paths(directory: str, mounts: Sequence[Mount]) -> bool:
    """Whether mount points have to be created below a directory of the machine."""
    new = (mount.target for mount in mounts if not os.path.lexists(mount.target))
    return any(target.startswith(directory + "/") for target in new)


def _mount_overlay(view: FileSystemView, lower: str, place: str) -> None:
    """Mount a directory of the machine with an upper layer for mount points, copied on write."""
    number = len(os.listdir(view.root))
    upper, work = f"{view.root}/upper{number}", f"{view.root}/work{number}"
    os.mkdir(upper)
    os.mkdir(work)
    _mount("overlay", place, "overlay", data=f"lowerdir={lower},upperdir={upper},workdir={work}")


def _resolved(root: str, path: str) -> str:
    """A path with its links followed as a process with this root does."""
    if root == "/":
        return os.path.realpath(path)
    found, waiting = "/", path.split("/")
    for _ in range(_MOST_LINKS):
        while waiting:
            part = waiting.pop(0)
            if part == "..":
                found = os.path.dirname(found)
            elif part not in ("", "."):
                found = os.path.join(found, part)
                if os.path.islink(root + found):
                    break
        else:
            return found
        link = os.readlink(root + found)
        waiting = [*link.split("/"), *waiting]
        found = "/" if link.startswith("/") else os.path.dirname(found)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def join(pid: int) -> None:
    """Give the calling process the view of another process.

    Raises:
        OSError: It is not permitted, or that process has ended.
    """
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
    for kind in ("uts", "mnt"):
        namespace = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        _check(_LIBC.setns(namespace, 0), f"setns {kind}")
    os.fchdir(root)
    os.chroot(".")


def _mount(
    source: str | None, target: str, kind: str = "", *, flags: int = 0, data: str = "", optional: bool = False
) -> None:
    texts = [text.encode() if text else None for text in (source, target, kind)]
    result = _LIBC.mount(*texts, ctypes.c_ulong(flags), data.encode())
    if not optional:
        _check(result, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
