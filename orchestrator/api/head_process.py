"""Lets a Python program launch by a process of its own: see head/background.

So the calling program, which may be a notebook, opens no connection and has no thread, signal
handler or child of ours. Functions import their modules themselves: this module stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.head.background.process import Answers
from orchestrator.protocol.message import encode_value

if TYPE_CHECKING:
    from orchestrator.config.launch import LaunchArguments, Where


def follow_job(answers: Answers, **which: Any) -> None:
    """Follow a job that has no head."""
    from orchestrator.head.commands import follow

    follow.follow_in_background(answers, **which)


def stop_job(answers: Answers, where: Where, experiment: str, grace: float | None) -> None:
    from orchestrator.head.commands.stop import end_job
    from orchestrator.head.follow import stop as stopping

    ended = end_job(where, experiment, grace)
    receipts = ended.receipts or []
    answers.send(
        receipts=encode_value(receipts),
        code=stopping.exit_code(receipts),
        text=stopping.receipts_to_text(receipts),
        why=ended.problem,
    )


def describe_nodes(answers: Answers, arguments: LaunchArguments) -> None:
    """Describe the machines, as `orchestrator nodes --json` does."""
    from orchestrator.head.commands.machines.nodes import find_machines
    from orchestrator.head.nodes import machine
    from orchestrator.head.start.request import resolve_request

    answers.send(nodes=[*map(machine.machine_to_json, find_machines(resolve_request(arguments)))])
