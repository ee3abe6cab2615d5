#!/usr/bin/env python3
"""Write the tables of messages in docs/protocol.md from the classes in orchestrator/protocol."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.protocol import control, events
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.request import (
    REQUESTS,
    ROOMS,
    Greeting,
    Heartbeat,
    SupervisorGone,
)

PAGE = Path(__file__).parents[1] / "docs/protocol.md"
BEGIN, END = "<!-- messages", "<!-- end of messages -->"
UNASKED = (Greeting, Heartbeat, SupervisorGone)


def fields(kind: type[Message], without: type[Message] = Message) -> str:
    names = [name for name in kind._defaults if name not in without._defaults]
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def first_line(kind: Any) -> str:
    return (typing.cast(str, kind.__doc__) or "").partition("\n")[0]


def requests() -> list[str]:
    lines = ["| request | with | answer | asks |", "|---|---|---|---|"]
    for room in ROOMS:
        importlib.import_module(f"orchestrator.protocol.requests.{room}")
    for do, kind in REQUESTS.items():
        answer = f"{kind.answer.__name__}: {fields(kind.answer)}"
        lines.append(f"| `{do}` | {fields(kind)} | {answer} | {first_line(kind)} |")
    return lines


def table(
    head: str, kinds: Sequence[tuple[str, type[Message]]], without: type[Message]
) -> list[str]:
    rows = [f"| {name} | {fields(kind, without)} | {first_line(kind)} |" for name, kind in kinds]
    return [f"| {head} | with | says |", "|---|---|---|", *rows]


def tables() -> str:
    unasked = [(kind.__name__, kind) for kind in UNASKED]
    happened = [(f"`{name}`", kind) for name, kind in events.EVENTS.items()]
    told = [("EndOrder", events.EndOrder), ("HeadNews", control.HeadState)]
    parts = [
        ["From the head to the server, with the server's answers:", "", *requests()],
        ["From the server, unasked:", "", *table("message", unasked, Message)],
        [
            "Events, from the supervisor. Each has its `time`, by the node's clock:",
            "",
            *table("event", happened, events.Event),
        ],
        ["To the supervisor, on its socket:", "", *table("line", told, Message)],
        [
            "Between supervisors:",
            "",
            *table("line", [("PeerHeartbeat", control.PeerHeartbeat)], Message),
        ],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def page() -> str:
    """Return the page with its tables as the code has them."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    comment, _, rest = rest.partition("\n")
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}{comment}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
