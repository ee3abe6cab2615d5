"""Reads small files of /sys and /proc; an unreadable one counts as empty.

A machine has thousands of them, so each is read with as few calls as possible.
"""

from __future__ import annotations

import os


def read_text(path: str, limit: int = 1 << 16) -> str:
    content = b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(content) < limit:
                data = os.read(fd, limit)
                content += data
                # The kernel returns one page at a time.
                if len(data) < 4096:
                    break
        finally:
            os.close(fd)
    # Reading a port that is down fails with EINVAL, and drivers have other errors.
    except OSError:
        return ""
    return content.decode("utf-8", "replace").strip()


def read_number(path: str) -> int | None:
    """Return a whole number, decimal or 0x...; None if there is none."""
    try:
        return int(read_text(path, 64), 0)
    except ValueError:
        return None


def list_names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def link_target(path: str) -> str:
    """Return the last part of a symbolic link's target: a driver, or a PCI address."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def read_meminfo(root: str = "") -> dict[str, int]:
    """Return the lines of /proc/meminfo, in bytes."""
    fields = {}
    for line in read_text(f"{root}/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields


def network_bytes(root: str = "") -> dict[str, tuple[int, int]]:
    """Return bytes received and sent by interface, except for purely virtual interfaces."""
    counts = {}
    for line in read_text(f"{root}/proc/net/dev", 1 << 18).splitlines()[2:]:
        name, _, rest = line.partition(":")
        name, fields = name.strip(), rest.split()
        path = f"{root}/sys/class/net/{name}"
        if len(fields) > 8 and (os.path.exists(f"{path}/device") or is_virtual_end(path)):
            counts[name] = (int(fields[0]), int(fields[8]))
    return counts


def is_virtual_end(path: str) -> bool:
    """Return True for one end of a veth pair: in a container it is the only network."""
    link, own = read_text(f"{path}/iflink"), read_text(f"{path}/ifindex")
    return bool(link) and link != own and not os.path.exists(f"{path}/master")
