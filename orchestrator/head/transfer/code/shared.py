"""Find out whether nodes see the head's own directory, and whether they see it as it is."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.common import files, interrupt
from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.transfer.code.listing import MARKER
from orchestrator.head.transfer.index import signature
from orchestrator.head.transfer.send import PUT_SECONDS
from orchestrator.protocol.requests.transfer import Compare

COMPARE_SECONDS = 60.0
NEWEST = 500  # files; a cache of a network disk forgets within minutes, so older ones are right
CODE = (".py", ".pyx", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".cu", ".cpp", ".h")


@contextlib.contextmanager
def marker(directory: Path) -> Iterator[str]:
    """Write a file that no other machine has, for as long as the nodes look for it.

    Where none can be written its name is empty: then no node counts as one that shares the disk.
    """
    path = directory / f"{os.fsdecode(MARKER)}{secrets.token_hex(8)}"
    files.delete_abandoned(directory, os.fsdecode(MARKER))
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o600))
    except OSError:
        yield ""
        return

    def remove() -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    forget = interrupt.before_exit(remove)  # Ctrl-C while nodes are reached leaves at once
    try:
        yield str(path)
    finally:
        remove()
        forget()


def check_same(
    reached: Sequence[Reached], directory: bytes, states: Mapping[bytes, os.stat_result]
) -> None:
    """Raise CheckFailed where a node sees other code than the head does: a disk that lags behind.

    Looks at the newest files of code. A file that changes just now counts for nothing.
    """
    code = {
        path: status
        for path, status in states.items()
        if stat.S_ISREG(status.st_mode) and path.endswith(tuple(map(str.encode, CODE)))
    }
    newest = sorted(code, key=lambda path: code[path].st_mtime_ns)[-NEWEST:]
    if not newest or not reached:
        return
    rows = [(path, b"%d" % code[path].st_size, b"%d" % code[path].st_mtime_ns) for path in newest]
    packed = zlib.compress(b"".join(field + b"\0" for row in rows for field in row), 1)
    request = Compare(directory=os.fsdecode(directory))

    def ask(node: Reached) -> Mapping[str, str]:
        node.channel.put(packed, PUT_SECONDS)
        return node.channel.ask(request, COMPARE_SECONDS).differ

    answers = fleet.everywhere(reached, ask)
    lines = []
    for node, answer in zip(reached, answers, strict=True):
        if isinstance(answer, OrchestratorError):
            raise NodeError(f"{node.node.name}: {answer.what}", answer.fix)
        differ = [name for name, seen in answer.items() if is_other(directory, name, seen, code)]
        if differ:
            more = f" and {len(differ) - 5} more" if len(differ) > 5 else ""
            lines.append(f"{node.node.name}: {', '.join(sorted(differ)[:5])}{more}")
    if lines:
        raise CheckFailed(
            "nodes share this directory and see other files in it:\n    " + "\n    ".join(lines),
            "launch again in a moment: a network disk may lag behind; --sync always sends each"
            " node the files as they are here",
        )


def is_other(
    directory: bytes, name: str, seen: str, states: Mapping[bytes, os.stat_result]
) -> bool:
    """Tell whether a node's content is another than the head's, which has stayed as it was."""
    path = os.fsencode(name)
    where = os.path.join(directory, path)
    if path not in states:
        return False
    try:
        with open(where, "rb") as file:
            digest = files.digest(file.fileno())
            same = signature(os.fstat(file.fileno())) == signature(states[path])
    except OSError:
        return False  # it has gone here, too
    return same and digest != seen
