"""The head says for whom it waits before an attempt."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.head.transfer.bring import resume
from orchestrator.head.transfer.bring.checkpoint import Partner
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import Checkpoints
from tests.head.transfer.bring.nodes import Channel


class Silent(Channel):
    """A node that does not answer one kind of request until something else was heard."""

    def __init__(self, kind: type[Request[Any]], heard: threading.Event) -> None:
        super().__init__()
        self.kind, self.heard = kind, heard
        self.busy = threading.Lock()

    def ask(self, request: Request[Any], timeout: float) -> Any:
        assert self.busy.acquire(blocking=False), "two ask at once"
        try:
            if isinstance(request, self.kind):
                assert self.heard.wait(30), f"nothing was heard while {request.do} was not answered"
            return super().ask(request, timeout)
        finally:
            self.busy.release()


def test_it_says_for_whom_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(resume, "LATE_SECONDS", 0.01)
    told, said = threading.Event(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    own = [Partner("n0", cast(Any, Silent(Checkpoints, told)))]
    looking = resume.Search(own, cast(Any, None), say, lambda: None)
    try:
        looking.held(own, Checkpoints(directory=str(tmp_path)))
    finally:
        looking.close()
    assert said == ["waiting for n0 to list their checkpoints, for 600 s at most"]
