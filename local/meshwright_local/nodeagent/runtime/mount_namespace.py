"""A container's own view of the file system, made with mount(2), unshare(2) and chroot(2) and no tool beside them.

The view is an overlay: its lower layer is the machine's root, its upper one a tmpfs, so mount points can be made
anywhere and nothing stays on the machine. On it lie the machine's other file systems and then the container's volumes,
each at its `mountPath`. All of it belongs to a mount namespace that only the container's processes hold: the kernel
takes it down with the last of them. A UTS namespace gives the container its pod's host name. Files of the lower layer
keep their pages in the machine's cache, so programs start as fast as outside. This takes CAP_SYS_ADMIN.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

_NEWNS, _NEWUTS = 0x00020000, 0x04000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)


class Mount(NamedTuple):
    """A file or directory of the machine and where the container sees it."""

    source: str
    target: str
    read_only: bool = False


class FileSystemView(NamedTuple):
    """What a container is to see. `root` is an empty directory to build it on, which stays empty for others."""

    root: str
    hostname: str
    mounts: Sequence[Mount]


def enter(view: FileSystemView) -> None:
    """Give the calling process the view as its root.

    Raises:
        OSError: Not permitted, or a mount that cannot be made; `filename` says which.
    """
    _check(_LIBC.unshare(_NEWNS | _NEWUTS), "unshare")
    socket.sethostname(view.hostname)
    _mount(None, "/", flags=_REC | _PRIVATE)
    # Links, such as /var/run, must lead into the view and not out of it. The machine's root has the same ones.
    mounts = [Mount(source, os.path.realpath(target), read_only) for source, target, read_only in view.mounts]
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        points = dict.fromkeys(line.split()[4].encode().decode("unicode_escape") for line in file)
    _mount("tmpfs", view.root, "tmpfs", data="mode=755")
    merged = f"{view.root}/view"
    os.mkdir(merged)
    for number, point in enumerate(points):
        new = (mount.target for mount in mounts if not os.path.lexists(mount.target))
        if point == "/" or any(target.startswith(point + "/") for target in new):
            # A place for mount points, copied on write.
            upper, work = f"{view.root}/upper{number}", f"{view.root}/work{number}"
            os.mkdir(upper)
            os.mkdir(work)
            _mount("overlay", merged + point, "overlay", data=f"lowerdir={point},upperdir={upper},workdir={work}")
        else:
            # One that lies hidden below another cannot be had, and nobody could see it anyway.
            _mount(point, merged + point, flags=_BIND, optional=True)
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


def join(pid: int) -> None:
    """Give the calling process the view of another one.

    Raises:
        OSError: Not permitted, or that process has ended.
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
