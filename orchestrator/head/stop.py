"""Ends jobs, and proves it: a receipt per node says what was killed and that nothing is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    EXIT_STOPPED,
    OrchestratorError,
)
from orchestrator.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.head import fleet, verdict
from orchestrator.head.nodes import Node
from orchestrator.head.ssh import Ssh

PROOF_SECONDS = 20.0  # beyond the grace: SIGKILL, the sweep, and looking again


@dataclass(frozen=True)
class Receipt:
    """One node's end of one job; without an error, `left` is what still lives."""

    node: str
    job: str
    took: float
    killed: dict[str, str]
    left: tuple[int, ...]
    error: str = ""


def stop_job(ssh: Ssh, record: JobRecord, grace: float) -> list[Receipt]:
    def end(node: NodeRecord) -> list[dict[str, Any]]:
        destination = ssh.config.destination(node.host, node.user, node.port)
        link = fleet.open_link(ssh.connect(destination), node.python, ssh.timeout)
        wait = grace + PROOF_SECONDS
        words = {"why": "stopped by the user", "grace": grace, "wait": wait}
        return [link.ask("end", wait + 20, job=record.job, node=node.index, **words)]

    started = time.monotonic()
    results = fleet.everywhere(record.nodes, end)
    found = receipts([node.name for node in record.nodes], results, started, record.job)
    then = f"; {meanwhile(record)}; then `orchestrator stop` again proves it"
    return [replace(one, error=one.error + then) if one.error else one for one in found]


def meanwhile(record: JobRecord) -> str:
    """What becomes of the job on a node that cannot be told to end it."""
    if len(record.nodes) == 1:
        return "the job goes on there until it can be reached"
    if record.on_node_loss == "wait":
        return "its supervisor will end the job itself once it is back"
    after = f"{record.node_loss_timeout:g} s after it was cut off"
    return f"its supervisor will end the job itself when its lease runs out ({after})"


def stop_everything(ssh: Ssh, nodes: Sequence[Node]) -> list[Receipt]:
    def end(node: Node) -> list[dict[str, Any]]:
        _, connection = fleet.connect(ssh, node)
        link = fleet.open_link(connection, node.python, ssh.timeout)
        words = {"why": "emergency stop", "grace": 0.0, "wait": PROOF_SECONDS}
        answer = link.ask("end_all", 3 * PROOF_SECONDS, **words)
        found: list[dict[str, Any]] = answer["receipts"]
        return found

    started = time.monotonic()
    return receipts([node.name for node in nodes], fleet.everywhere(nodes, end), started, "")


def receipts(
    names: Sequence[str],
    results: Sequence[list[dict[str, Any]] | OrchestratorError],
    started: float,
    job: str,
) -> list[Receipt]:
    took = time.monotonic() - started
    found = []
    for name, result in zip(names, results, strict=True):
        if isinstance(result, OrchestratorError):
            found.append(Receipt(name, job, took, {}, (), result.what))
            continue
        for one in result:
            left = tuple(one["left"])
            found.append(Receipt(name, one["job"], took, one["killed"], left))
    return found


def exit_code(found: Sequence[Receipt]) -> int:
    if any(receipt.error for receipt in found):
        return EXIT_NODE
    return EXIT_FAILED if any(receipt.left for receipt in found) else EXIT_DONE


def to_text(found: Sequence[Receipt]) -> str:
    lines = []
    for receipt in found:
        if receipt.error:
            words = f"NOT REACHED: {receipt.error}"
        elif receipt.left:
            words = f"STILL ALIVE: {', '.join(map(str, receipt.left))}"
        else:
            killed = f", {len(receipt.killed)} processes had to be killed" if receipt.killed else ""
            words = f"{receipt.job}: ended, nothing left{killed}"
        lines.append(f"{receipt.node}: {words}")
    return "\n".join(lines or ["nothing of ours runs on these nodes"])


def to_json(found: Sequence[Receipt]) -> list[dict[str, Any]]:
    return [asdict(receipt) for receipt in found]


def conclude(place: Experiment, found: Sequence[Receipt]) -> None:
    """Where no head follows the job, its record is brought up to date here."""
    if place.lock() is not None:
        return  # the head that follows it sees the end itself
    record = place.read_record()
    if not record.over and exit_code(found) == EXIT_DONE:
        nodes = [replace(node, state="ended") for node in record.nodes]
        now = time.time()
        told = verdict.stopped("orchestrator stop", now)
        ended = replace(record, state="stopped", exit_code=EXIT_STOPPED, ended=now, verdict=told)
        place.write_record(replace(ended, nodes=nodes))
    place.unlock()
