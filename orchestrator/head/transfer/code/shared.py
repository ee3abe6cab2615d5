"""Find out whether nodes see the head's own directory, and whether they see it as it is."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.common import files, interrupt
from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.transfer.code.listing import MARKER
from orchestrator.head.transfer.peer import Peer
from orchestrator.head.transfer.send import Outbox, Sender
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.manifest import FILE, Entry
from orchestrator.protocol.requests.transfer import Place
from orchestrator.protocol.timing import FILE_ANSWER_SECONDS

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
    entries = [
        Entry(path, FILE, 0o600, code[path].st_size, b"", code[path].st_mtime_ns) for path in newest
    ]
    outbox = Outbox(Tree.of(directory, entries))
    into = Place(directory=os.fsdecode(directory))

    def ask(node: Reached) -> dict[bytes, str]:
        """Return what the node sees otherwise: its checksum, where the size is the same."""
        sender = Sender(outbox, Peer(node.node.name, node.channel), into)
        lacking = sender.offer(dry_run=True, seconds=FILE_ANSWER_SECONDS)
        sums = {begun.number: begun.sum for begun in lacking.begun}
        numbers = [*sender.numbers, *lacking.failed]
        return {outbox.tree.entries[at].path: sums.get(at, "") for at in numbers}

    answers = fleet.everywhere(reached, ask)
    lines = []
    for node, answer in zip(reached, answers, strict=True):
        if isinstance(answer, OrchestratorError):
            raise NodeError(f"{node.node.name}: {answer.what}", answer.fix)
        differ = [
            os.fsdecode(path)
            for path, seen in answer.items()
            if is_other(os.path.join(directory, path), seen, code[path])
        ]
        if differ:
            more = f" and {len(differ) - 5} more" if len(differ) > 5 else ""
            lines.append(f"{node.node.name}: {', '.join(sorted(differ)[:5])}{more}")
    if lines:
        raise CheckFailed(
            "nodes share this directory and see other files in it:\n    " + "\n    ".join(lines),
            "launch again in a moment: a network disk may lag behind; --sync always sends each"
            " node the files as they are here",
        )


def is_other(path: bytes, seen: str, status: os.stat_result) -> bool:
    """Tell whether a node's content is another than the head's, which has stayed as it was."""
    try:
        with open(path, "rb") as file:
            digest = files.digest(file.fileno())
            same = files.state_of(os.fstat(file.fileno())) == files.state_of(status)
    except OSError:
        return False  # it has gone here, too
    return same and digest != seen
