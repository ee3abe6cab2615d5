"""Nodes without the network between head and node, and what is in a directory of one."""

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.head.connect.channel import Declined
from orchestrator.node.server.session import Refusal, ServerSession
from orchestrator.protocol.requests.request import Request


class Channel:
    """A channel to a session; it notes what was asked."""

    def __init__(self) -> None:
        self.session, self.asked = ServerSession(), list[str]()
        self.connection = SimpleNamespace(address="127.0.0.1", close=lambda: None)

    def ask(self, request: Request[Any], seconds: float) -> Any:
        self.asked.append(request.do.partition(".")[2])
        try:
            return self.session.answer(request)
        except Refusal as refusal:
            raise Declined(str(refusal), refusal.kind) from None

    def put(self, data: bytes, seconds: float) -> None:
        self.session.piece += data

    def post(self, request: Request[Any]) -> Any:
        """Answer at once; an answer that is a refusal is raised when it is waited for."""
        try:
            return self.ask(request, 0.0)
        except Declined as refusal:
            return refusal

    def wait_for(self, answer: Any, request: Request[Any], seconds: float) -> Any:
        if isinstance(answer, Declined):
            raise answer
        return answer


def tree(root: Path, *, times: bool = False) -> dict[str, object]:
    """Return everything below a directory: contents and modes of files, targets of links."""
    known: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        value: object = "other"
        if stat.S_ISLNK(status.st_mode):
            value = str(path.readlink())
        elif stat.S_ISREG(status.st_mode):
            changed = [status.st_mtime_ns] if times else []
            value = (path.read_bytes(), stat.S_IMODE(status.st_mode), *changed)
        known[str(path.relative_to(root))] = value
    return known
