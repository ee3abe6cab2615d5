"""Our sources that run on nodes, read once and packed for all of them."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import zlib
from pathlib import Path
from typing import NamedTuple

HOUSE = Path(__file__).parents[2]

# What runs on nodes: the node's side, the engine, and what a user's script may import of us there.
TRAVELS = (
    *("__init__.py", "distributed.py", "common", "config", "records", "protocol", "node"),
    *("engine", "traces", "trackers"),
)


class Library(NamedTuple):
    """Our sources that run on nodes, which have only torch."""

    digest: str  # its name there
    checksum: int  # of all names and contents, in any order
    text: bytes  # {name: source}


READING = threading.Lock()


def sources() -> list[Path]:
    return [
        path
        for name in TRAVELS
        for path in (sorted((HOUSE / name).rglob("*.py")) if "." not in name else [HOUSE / name])
    ]


def library() -> Library:
    """Return it, read once however many nodes are connected to at the same moment."""
    with READING:
        return read()


def parcel() -> bytes:
    """Return what a node is sent that lacks it: its size in a line, and the sources, packed."""
    with READING:
        return pack(read().text)


@functools.cache
def read() -> Library:
    files = {
        f"orchestrator/{path.relative_to(HOUSE)}": path.read_text(encoding="utf-8")
        for path in sources()
    }
    files["__main__.py"] = "from orchestrator.node.main import main\n\nmain()\n"
    text = json.dumps(files).encode("ascii")
    checksum = sum(zlib.crc32(files[name].encode(), zlib.crc32(name.encode())) for name in files)
    return Library(hashlib.sha256(text).hexdigest()[:16], checksum, text)


@functools.lru_cache(maxsize=1)
def pack(text: bytes) -> bytes:
    packed = zlib.compress(text, 6)
    return b"%d\n%b" % (len(packed), packed)


@functools.cache
def installer() -> str:
    texts = [HOUSE / "common/permissions.py", HOUSE / "node/install.py"]
    return "\n".join(path.read_text(encoding="utf-8") for path in texts)
