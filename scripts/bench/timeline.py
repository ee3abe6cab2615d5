"""Show where the time of one launch goes: launch.py --profile runs this instead of master_launch.

The program below wraps functions of the head and records when each began and ended; the nodes'
part comes from the events of their supervisors, torchrun's own log and the ranks.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

WRAPPED = (
    ("orchestrator.head.start.request", "resolve_request", "read the config"),
    ("orchestrator.head.connect.fabric_login", "log_in", "log in"),
    ("orchestrator.head.connect.reach", "open_channel", "shell, Python, server"),
    ("orchestrator.head.connect.channel", "NodeChannel.ask", "ask: "),
    ("orchestrator.head.start.nodes", "try_nodes", "all nodes reached and probed"),
    ("orchestrator.head.start.parts", "make_plan", "plan"),
    ("orchestrator.head.start.record", "make_manifest", "manifest"),
    ("orchestrator.head.start.launch", "start_all", "all nodes started"),
)
TORCHRUN_LINE = re.compile(r"^[IW]\d{4} (\d\d):(\d\d):(\d\d\.\d+) .*?\] (.*)$", re.MULTILINE)
TORCHRUN_WORDS = {
    "Starting elastic_operator": "torchrun: torch imported, agent begins",
    "Rendezvous'ing worker group": "torchrun: rendezvous begins",
    "Rendezvous complete": "torchrun: rendezvous complete",
    "Starting worker group": "torchrun: forks the ranks",
}


class Span(NamedTuple):
    """A span from the first beginning to the last end, in seconds since the command."""

    begin: float
    end: float
    where: str
    what: str


# -- on the head, in place of master_launch -----------------------------------------------------


def record(file: Path) -> None:
    """Run master_launch with the rest of the command line; write its spans to the file as JSON."""
    spans: list[tuple[float, float, str]] = [(0.0, time.time(), "Python starts")]
    begin = time.time()
    from orchestrator import entry

    for module, name, what in WRAPPED:
        owner: Any = importlib.import_module(module)
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, noted(getattr(owner, last), what, spans))
    spans.append((begin, time.time(), "imports"))
    leave = os._exit

    def write_and_leave(status: int) -> NoReturn:
        file.write_text(json.dumps(spans))
        leave(status)

    # Our commands end with os._exit.
    os._exit = write_and_leave
    entry.master_launch()


def noted(
    function: Callable[..., Any], what: str, spans: list[tuple[float, float, str]]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begin = time.time()
        try:
            return function(*args, **kwargs)
        finally:
            label = what + args[1].do if what.endswith(" ") else what
            spans.append((begin, time.time(), label))

    return wrapped


# -- in launch.py -------------------------------------------------------------------------------


def gather(started: float, head: Path, homes: Sequence[Path], ranks: Iterable[Any]) -> list[Span]:
    """Return everything that was recorded, in order of its beginning."""
    notes: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def note(where: str, what: str, begin: float, end: float) -> None:
        notes.setdefault((where, what), []).append((begin - started, end - started))

    today = time.localtime(started)
    for begin, end, what in json.loads(head.read_text()):
        note("head", what, begin or started, end)
    for home in homes:
        for events in home.glob(".orchestrator/runs/*/*/*/events.jsonl"):
            for event in map(json.loads, events.read_text().splitlines()):
                note("node", f"supervisor: {event['event']}", event["time"], event["time"])
            text = (events.parent / "log").read_text(errors="replace")
            for hour, minute, second, said in TORCHRUN_LINE.findall(text):
                at = time.mktime((*today[:3], int(hour), int(minute), 0, 0, 0, -1)) + float(second)
                for begins, words in TORCHRUN_WORDS.items():
                    if said.startswith(begins):
                        note("node", words, at, at)
    for times in ranks:
        steps = list(times.items())
        note("rank", "program begins", steps[0][1], steps[0][1])
        for (_, begin), (step, end) in itertools.pairwise(steps):
            note("rank", step, begin, end)
    spans = [
        Span(min(b for b, _ in pairs), max(e for _, e in pairs), where, what)
        for (where, what), pairs in notes.items()
    ]
    return sorted(spans)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    sys.argv = ["master_launch", *sys.argv[2:]]
    record(target)
