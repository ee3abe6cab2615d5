"""The rules of the machines' policy files, which every launch keeps by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.common.errors import CheckFailed
from orchestrator.common.text import duration, parse_seconds, plural
from orchestrator.head.connect.reach import Reached
from orchestrator.head.start.request import Request
from orchestrator.protocol.requests.start import Page


def strictest(nodes: Sequence[Reached], name: str) -> tuple[float, str] | None:
    """Return what a rule allows on these nodes, and where it says so; None where there is none."""
    rules = [
        (value, f"{name} in {node.facts.policy.file} on {node.node.name}")
        for node in nodes
        if (value := getattr(node.facts.policy, name))
    ]
    return min(rules, default=None)


def check_time(request: Request, nodes: Sequence[Reached]) -> None:
    """Refuse a launch that may run for longer than its nodes allow."""
    rule, limit = strictest(nodes, "time_limit"), request.config.launch.time_limit
    if rule is None or (limit and parse_seconds("--time-limit", limit) <= rule[0]):
        return
    most, where = rule
    typed = f"{most / 3600:g}h" if most % 3600 == 0 else f"{most:g}s"
    raise CheckFailed(
        f"a job has to end within {duration(most)} ({where}), and this one has"
        f" {f'--time-limit {limit}' if limit else 'no --time-limit'}; nothing was started",
        f"--time-limit {typed}, and --max-restarts or a further launch goes on from what it saved",
    )


def too_many(books: Mapping[str, Page], more: int, leaving: int = 0) -> str:
    """Say why a user cannot have so many GPUs more, beside those of all their jobs that stay."""
    known = [
        (book.policy.gpus_per_user, f"gpus_per_user in {book.policy.file} on {name}")
        for name, book in books.items()
        if book.policy.gpus_per_user
    ]
    most, where = min(known, default=(0, ""))
    own = sum(book.own for book in books.values()) - leaving
    if not most or own + more <= most:
        return ""
    held = f"your jobs have {own} already, and " if own else ""
    return f"{held}{more} are wanted; each user may have {plural(most, 'GPU')} ({where})"
