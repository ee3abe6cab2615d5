"""Reads small files of /sys and /proc: one that cannot be read is empty, and no error.

A machine has thousands of them, so they are read with as few calls as there can be.
"""

from __future__ import annotations

import os


def text(path: str, limit: int = 1 << 16) -> str:
    content = b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(content) < limit:
                data = os.read(fd, limit)
                content += data
                if len(data) < 4096:  # the kernel gives a page at a time
                    break
        finally:
            os.close(fd)
    except OSError:  # a port that is down says EINVAL, a driver may say anything
        return ""
    return content.decode("utf-8", "replace").strip()


def number(path: str) -> int | None:
    """Return a whole number, decimal or 0x...; None where there is none."""
    try:
        return int(text(path, 64), 0)
    except ValueError:
        return None


def names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def target(path: str) -> str:
    """Return the last part of where a symbolic link leads: a driver, or a PCI address."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def meminfo(root: str = "") -> dict[str, int]:
    """Return the lines of /proc/meminfo, in bytes."""
    fields = {}
    for line in text(f"{root}/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields


def network_bytes(root: str = "") -> dict[str, tuple[int, int]]:
    """Return interface -> bytes received and sent, of those that are none of software alone."""
    counts = {}
    for line in text(f"{root}/proc/net/dev", 1 << 18).splitlines()[2:]:
        name, _, rest = line.partition(":")
        name, fields = name.strip(), rest.split()
        path = f"{root}/sys/class/net/{name}"
        if len(fields) > 8 and (os.path.exists(f"{path}/device") or is_virtual_end(path)):
            counts[name] = (int(fields[0]), int(fields[8]))
    return counts


def is_virtual_end(path: str) -> bool:
    """Tell whether an interface is one end of a pair: in a container it is the only network."""
    link, own = text(f"{path}/iflink"), text(f"{path}/ifindex")
    return bool(link) and link != own and not os.path.exists(f"{path}/master")
