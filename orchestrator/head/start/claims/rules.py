"""The rules of the machines' policy files, which every launch keeps by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.common.errors import CheckFailed
from orchestrator.common.text import duration, parse_seconds, plural
from orchestrator.head.connect.reach import Reached
from orchestrator.head.start.request import Request
from orchestrator.protocol.requests.start import Page


@dataclass(frozen=True)
class Rule:
    """A rule that counts for a launch: the strictest of its nodes."""

    name: str
    value: float
    node: str
    file: str

    @property
    def where(self) -> str:
        return f"{self.name} in {self.file} on {self.node}"


def strictest(nodes: Sequence[Reached], name: str) -> Rule | None:
    rules = [
        Rule(name, value, node.node.name, node.facts.policy.file)
        for node in nodes
        if (value := getattr(node.facts.policy, name))
    ]
    return min(rules, key=lambda rule: rule.value, default=None)


def check_time(request: Request, nodes: Sequence[Reached]) -> None:
    """Refuse a launch that may run for longer than its nodes allow."""
    rule, limit = strictest(nodes, "time_limit"), request.config.launch.time_limit
    if rule is None or (limit and parse_seconds("--time-limit", limit) <= rule.value):
        return
    hours = rule.value / 3600
    typed = f"{hours:g}h" if hours == round(hours) else f"{rule.value:g}s"
    raise CheckFailed(
        f"a job has to end within {duration(rule.value)} ({rule.where}), and this one has"
        f" {f'--time-limit {limit}' if limit else 'no --time-limit'}; nothing was started",
        f"--time-limit {typed}, and --max-restarts or a further launch goes on from what it saved",
    )


def too_many(nodes: Sequence[Reached], books: Sequence[Page], more: int) -> str:
    """Say why a user cannot have so many GPUs more, beside those of all their jobs."""
    rule = strictest(nodes, "gpus_per_user")
    own = sum(book.own for book in books)
    if rule is None or own + more <= rule.value:
        return ""
    held = f"your jobs have {own} already, and " if own else ""
    allowed = plural(round(rule.value), "GPU")
    return f"{held}{more} are wanted; each user may have {allowed} ({rule.where})"
