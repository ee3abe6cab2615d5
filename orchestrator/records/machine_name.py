"""The name under which something is remembered of a machine, whoever logs in there."""

from __future__ import annotations

import ipaddress
from typing import Protocol


class Place(Protocol):
    """A node of a list or of a record."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int | None: ...


def machine_of(node: Place) -> str:
    """Write host:port, or [v6]:port; the host alone where the list gives no port."""
    host = node.host.lower()
    if ":" in host:
        host = canonical(host)
    if node.port is None:
        return host
    return f"[{host}]:{node.port}" if ":" in host else f"{host}:{node.port}"


def canonical(host: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        return host
