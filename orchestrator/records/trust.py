"""Signs the records of jobs that this login launched, and verifies such signatures.

A record is data. The machines, the ssh_config and the Python that it names are orders, because they
decide which commands run here and on nodes. They count only if this login signed them, with a key
that no other user can read. Ownership is not enough: experiments in a cloned repository belong to
this login, and have no signature.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.permissions import other_writers

# The fields of a record that decide which commands run.
Orders = Mapping[str, Any]

# Relative to the directory of the experiment.
SIGNATURE = ".launched"
KEY = "record.key"
KEY_BYTES = 32


def key_file() -> Path:
    return Path(files.our_directory(), KEY)


def read_key() -> bytes | None:
    """Return this login's key, or None if there is none that only this login can read."""
    try:
        with files.open_plain(key_file()) as file:
            status, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
    except OSError:
        return None
    ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return key if ours and len(key) == KEY_BYTES else None


def make_key() -> bytes | None:
    """Return this login's key, after creating it if necessary. None if it cannot be stored."""
    key, path = read_key(), key_file()
    if key is not None:
        return key
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f".{KEY}.{secrets.token_hex(4)}")
        try:
            files.replace_file(new, secrets.token_bytes(KEY_BYTES))
            if path.exists() and read_key() is None:
                # The key exists, but others could read it.
                new.rename(path)
            else:
                # The link fails if another launch was faster. That launch's key then counts.
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)
    return read_key()


def code(key: bytes, orders: Orders, exposed: str) -> str:
    text = json.dumps({**orders, "exposed": exposed}, sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def sign_orders(directory: Path, orders: Orders) -> None:
    """Sign a record's orders as this login. On a full disk, they stay unsigned."""
    key = make_key()
    if key is None:
        return
    with contextlib.suppress(OSError):
        # Some file systems (CIFS, NFS that maps all users to one) keep no modes or owners. A new
        # directory of mode 0700 looks there as if others could write it.
        exposed = other_writers(directory.stat())
        signed = {"exposed": exposed, "hmac": code(key, orders, exposed)}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            # The signature of the previous record stays valid until the new record is written.
            signed["before"] = str(read(directory / SIGNATURE)["hmac"])
        files.replace_file(directory / SIGNATURE, json.dumps(signed) + "\n")


def read(path: str | Path, directory: int | None = None) -> dict[str, Any]:
    return dict(json.loads(files.read_plain(path, directory, 4096)))


def signed_exposure(directory: int, orders: Orders) -> str | None:
    """Return how exposed the directory was when this login signed the orders, else None.

    The signature of the previous record counts as well: that record stays until the new one is
    written.
    """
    key = read_key()
    try:
        data = read(SIGNATURE, directory)
        exposed, known = str(data["exposed"]), (str(data["hmac"]), str(data.get("before", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if key is None:
        return None
    right = code(key, orders, exposed).encode()
    return exposed if any(hmac.compare_digest(one.encode(), right) for one in known) else None
