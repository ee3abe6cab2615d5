"""Asks the app in this process, over ASGI: no port, no other client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.views.dashboard.app import Board, app
from orchestrator.views.dashboard.command import compared
from orchestrator.views.dashboard.guard import Guard
from orchestrator.views.dashboard.listing import Listing

PATIENCE = 60.0


@dataclass
class Got:
    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()

    def events(self, name: str) -> list[Any]:
        """The data of the events of one kind."""
        parts = [part.partition("\n") for part in self.text.split("\n\n")]
        return [
            json.loads(rest.removeprefix("data: "))
            for first, _, rest in parts
            if first == f"event: {name}"
        ]


@dataclass
class Site:
    """A board over a directory, and somebody who has its token."""

    root: Path
    stopped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.guard = Guard(8321)
        self.board = Board(Listing(self.root), self.guard, compared, self.stop)
        self.app = app(self.board)

    async def stop(self, name: str) -> str:
        self.stopped.append(name)
        return "node 0: nothing left"

    def get(self, path: str, **headers: str) -> Got:
        return asyncio.run(self.ask(path, headers={**self.own, **headers}))

    @property
    def own(self) -> dict[str, str]:
        return {"cookie": f"{self.guard.cookie}={self.guard.session}"}

    async def ask(
        self,
        path: str,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        until: Callable[[Got], object] = lambda _: False,
    ) -> Got:
        """Ask once; a stream is left when what came is enough."""
        path, _, query = path.partition("?")
        given = {"host": "localhost:8321", **(self.own if headers is None else headers)}
        scope = {
            **{"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}},
            **{"http_version": "1.1", "method": method, "scheme": "http", "root_path": ""},
            **{"path": path, "raw_path": path.encode()},
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8321),
        }
        got, left, asked = Got(), asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                got.code = message["status"]
                got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                got.body += message.get("body", b"")
            if until(got):
                left.set()

        await asyncio.wait_for(self.app(scope, receive, send), PATIENCE)
        return got
