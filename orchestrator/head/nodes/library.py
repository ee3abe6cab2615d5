"""Reads our sources that run on nodes once, and packs them for all nodes."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import zlib
from pathlib import Path
from typing import NamedTuple

HOUSE = Path(__file__).parents[2]

# The parts that run on nodes: the node's side, the engine, and modules that scripts import there.
TRAVELS = (
    *("__init__.py", "distributed.py", "common", "config", "records", "protocol", "node"),
    *("engine", "traces", "trackers"),
)


class Library(NamedTuple):
    """Our sources that run on nodes, which have only torch."""

    # The name of the library on the node.
    digest: str
    # A checksum of all names and contents that is independent of their order.
    checksum: int
    # Pairs of a name and its source.
    files: tuple[tuple[str, bytes], ...]


READING = threading.Lock()


def source_files() -> list[Path]:
    return [
        path
        for name in TRAVELS
        for path in (sorted((HOUSE / name).rglob("*.py")) if "." not in name else [HOUSE / name])
    ]


def own_library() -> Library:
    """Return the library; it is read once, also if many threads ask at the same time."""
    with READING:
        return read_library()


def packed_library() -> bytes:
    """Return the payload for a node without the library: a size line and packed {name: source}."""
    with READING:
        return pack_files(read_library().files)


@functools.cache
def read_library() -> Library:
    files = {
        f"orchestrator/{path.relative_to(HOUSE)}": path.read_bytes() for path in source_files()
    }
    files["__main__.py"] = b"from orchestrator.node.main import main\n\nmain()\n"
    sums = {name: zlib.crc32(data, zlib.crc32(name.encode())) for name, data in files.items()}
    digest = hashlib.sha256(repr(list(files)).encode())
    for data in files.values():
        digest.update(b"%d\n%b" % (len(data), data))
    return Library(digest.hexdigest()[:16], sum(sums.values()), tuple(files.items()))


@functools.lru_cache(maxsize=1)
def pack_files(files: tuple[tuple[str, bytes], ...]) -> bytes:
    texts = {name: data.decode("utf-8") for name, data in files}
    packed = zlib.compress(json.dumps(texts).encode("ascii"), 6)
    return b"%d\n%b" % (len(packed), packed)


@functools.cache
def installer_program() -> str:
    texts = [HOUSE / "common/permissions.py", HOUSE / "node/install.py"]
    return "\n".join(path.read_text(encoding="utf-8") for path in texts)
