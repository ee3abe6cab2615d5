"""Asks the app in this process, over ASGI: no port, no other client."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config.launch import Where
from orchestrator.views.dashboard.app import Board, Guard, dashboard_app
from orchestrator.views.top.sample import TopSample
from tests.views.top.samples import job, sample


@dataclass
class Got:
    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""


@dataclass
class Site:
    """A dashboard over a directory, and a client that has its token."""

    root: Path
    stopped: list[str] = field(default_factory=list)
    sample: TopSample = field(default_factory=lambda: sample(job("train")))

    def __post_init__(self) -> None:
        self.guard = Guard(8321)
        self.board = Board(Where(experiments=self.root), self.guard, self.stop, lambda: self.sample)
        self.app = dashboard_app(self.board)

    def stop(self, name: str) -> str:
        self.stopped.append(name)
        return "node 0: nothing left"

    @property
    def own(self) -> dict[str, str]:
        return {"cookie": f"{self.guard.cookie}={self.guard.derived('session')}"}

    def get(self, path: str, **headers: str) -> Got:
        return self.ask(path, headers={**self.own, **headers})

    def ask(
        self, path: str, method: str = "GET", headers: Mapping[str, str] = {}, body: bytes = b""
    ) -> Got:
        return asyncio.run(ask(self.app, path, method, headers, body))


async def ask(
    app: Any, path: str, method: str = "GET", headers: Mapping[str, str] = {}, body: bytes = b""
) -> Got:
    path, _, query = path.partition("?")
    given = {"host": "localhost:8321", "content-length": str(len(body)), **headers}
    scope = {
        **{"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}},
        **{"http_version": "1.1", "method": method, "scheme": "http", "root_path": ""},
        **{"path": path, "raw_path": path.encode(), "query_string": query.encode()},
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8321),
    }
    got, data = Got(), b""
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not requests:
            # The client stays connected.
            await asyncio.sleep(3600)
        return requests.pop()

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal data
        if message["type"] == "http.response.start":
            got.code = message["status"]
            got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            data += message.get("body", b"")

    await asyncio.wait_for(app(scope, receive, send), 60)
    got.text = data.decode()
    return got
