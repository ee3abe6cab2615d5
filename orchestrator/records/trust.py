"""Tell whose record an experiment has, and whether this login launched its job.

A record is data. The machines, the ssh_config and the Python that it names are orders, because they
decide which commands run here and there: they count only if this login signed them, with a key that
nobody else can read. A repository that was cloned with experiments in it is ours by its owner, and
not signed.
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
from orchestrator.common.permissions import others

Orders = Mapping[str, Any]  # what a record decides about the commands that run

SIGNATURE = ".launched"  # in the experiment
KEY = "record.key"
KEY_BYTES = 32


def key_file() -> Path:
    return Path(files.our_directory(), KEY)


def read_key() -> bytes | None:
    """Return this login's key, if there is one that is its own alone."""
    try:
        with files.open_plain(key_file()) as file:
            status, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
    except OSError:
        return None
    ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return key if ours and len(key) == KEY_BYTES else None


def make_key() -> bytes | None:
    """Return this login's key; make one if there is none. Nothing, where none can be kept."""
    key, path = read_key(), key_file()
    if key is not None:
        return key
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f".{KEY}.{secrets.token_hex(4)}")
        try:
            files.replace(new, secrets.token_bytes(KEY_BYTES))
            if path.exists():  # and others could read it
                new.rename(path)
            else:
                os.link(new, path)  # fails if another launch was faster, whose key then counts
        finally:
            new.unlink(missing_ok=True)
    return read_key()


def code(key: bytes, orders: Orders, exposed: str) -> str:
    text = json.dumps({**orders, "exposed": exposed}, sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def sign(directory: Path, orders: Orders) -> None:
    """Mark a record's orders as this login's; on a disk without room they stay unmarked."""
    key = make_key()
    if key is None:
        return
    with contextlib.suppress(OSError):
        # Some file systems (CIFS, NFS that maps all users to one) keep no modes or owners: there
        # a directory that was just made 0700 looks as if others could write it.
        exposed = others(directory.stat())
        signed = {"exposed": exposed, "hmac": code(key, orders, exposed)}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            signed["before"] = str(read(directory)["hmac"])  # of the record that is still there
        files.replace(directory / SIGNATURE, json.dumps(signed) + "\n")


def read(directory: int | Path) -> dict[str, Any]:
    if isinstance(directory, Path):
        with files.opened(directory) as descriptor:
            return read(descriptor)
    with files.open_plain(SIGNATURE, directory) as file:
        return dict(json.loads(file.read(4096)))


def signature(directory: int, orders: Orders) -> str | None:
    """Return how exposed the directory was when this login signed the orders; None: it did not.

    The record before this one counts, too: it stands there until the new one is written.
    """
    key = read_key()
    try:
        data = read(directory)
        exposed, known = str(data["exposed"]), (str(data["hmac"]), str(data.get("before", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if key is None:
        return None
    right = code(key, orders, exposed).encode()
    return exposed if any(hmac.compare_digest(one.encode(), right) for one in known) else None
