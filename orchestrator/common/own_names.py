"""Tells whether a request of HTTP was meant for this machine, or for a name of somebody's DNS."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection


def is_own(host: str, more: Collection[str] = ()) -> bool:
    """Tell whether a Host header is an address or a name of this machine: no DNS rebinding."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name in {"localhost", os.uname().nodename.lower(), *more}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
