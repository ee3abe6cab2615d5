"""Looking at a job without touching it: status from the nodes, jobs that another head started."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.transport import Transport
from orchestrator.head.inventory.node_list import Node
from orchestrator.head.slurm import queue
from orchestrator.records import experiment
from orchestrator.records.experiment import JobRecord, NodeRecord
from orchestrator.text import duration


def ask_nodes(ssh: Transport, record: JobRecord) -> list[dict[str, Any]]:
    """What every node of the job says of it now: its job_state, or that it is unreachable."""

    def ask(node: NodeRecord) -> dict[str, Any]:
        destination = ssh.config.destination(node.host, node.user, node.port)
        link = fleet.open_link(ssh.connect(destination), node.python, ssh.timeout)
        states = link.ask("jobs", ssh.timeout, job=record.job)["jobs"]
        mine = [state for state in states if state["node"] == node.index]
        link.connection.close()
        return dict(mine[0]) if mine else {"state": "unknown there", "ranks": {}}

    found = []
    for result in fleet.everywhere(record.nodes, ask):
        if isinstance(result, OrchestratorError):
            found.append({"state": "unreachable", "why": result.what, "ranks": {}})
        else:
            found.append(result)
    return found


def from_record(record: JobRecord) -> list[dict[str, Any]]:
    return [
        {"state": node.state, "ranks": node.ranks, "agent": node.exit_code} for node in record.nodes
    ]


def job_now(record: JobRecord, states: Sequence[dict[str, Any]]) -> str:
    if record.over:
        return record.state
    if states and all(state["state"] == "ended" for state in states):
        return "ended (its logs and its verdict: orchestrator attach)"
    return record.state


def to_text(
    record: JobRecord, states: Sequence[dict[str, Any]], slurm: queue.Place | None = None
) -> str:
    lines = [f"{record.job}: {job_now(record, states)}, {len(record.nodes)} nodes"]
    if record.slurm_job is not None:
        lines[0] += f", Slurm's job {record.slurm_job}" + (f": {slurm}" if slurm else "")
    for node, state in zip(record.nodes, states, strict=True):
        first = f"  node {node.index}  {node.name}  {state['state']}"
        if state.get("why"):
            first += f": {state['why']}"
        if state.get("log_time"):
            silence = round(max(0.0, time.time() - state["log_time"]))
            first += f", last output {duration(silence)} ago"
        lines.append(first)
        for rank, told in sorted(state["ranks"].items(), key=lambda item: int(item[0])):
            words = told.get("state", "?")
            if told.get("code") is not None:
                words += f" with exit code {told['code']}"
            lines.append(f"    rank {rank}  pid {told.get('pid', '?')}  {words}")
    return "\n".join(lines)


def to_json(
    record: JobRecord, states: Sequence[dict[str, Any]], slurm: queue.Place | None = None
) -> str:
    nodes = [
        {"index": node.index, "name": node.name, "address": node.address, **state}
        for node, state in zip(record.nodes, states, strict=True)
    ]
    told: dict[str, Any] = {
        "job": record.job,
        "experiment": record.experiment,
        "state": job_now(record, states),
    }
    told = {**told, "exit_code": record.exit_code, "verdict": record.verdict, "nodes": nodes}
    if record.slurm_job is not None:
        told["slurm"] = {"job": record.slurm_job, **(asdict(slurm) if slurm else {})}
    return json.dumps(told, indent=1)


# -- jobs of another head ---------------------------------------------------------------------


def find_on_nodes(ssh: Transport, nodes: Sequence[Node], wanted: str | None) -> JobRecord:
    """A job known to the nodes of the list only; the newest where no name is given."""

    def ask(node: Node) -> list[dict[str, Any]]:
        _, connection = fleet.connect(ssh, node)
        link = fleet.open_link(connection, node.python, ssh.timeout)
        found: list[dict[str, Any]] = link.ask("jobs", ssh.timeout)["jobs"]
        connection.close()
        return found

    results = fleet.everywhere(nodes, ask)
    seen = [
        (node, state)
        for node, result in zip(nodes, results, strict=True)
        if not isinstance(result, OrchestratorError)
        for state in result
        if "nproc" in state and wanted in (None, state["experiment"], state["job"])
    ]
    if not seen:
        fleet.all_or_table(nodes, results, "")  # a node that is down may be the one that knows it
        raise UsageError(
            f"no experiment {wanted!r} is known here or on the nodes"
            if wanted
            else "there is no experiment here, and none is known on the nodes"
        )
    newest = max((state for _, state in seen), key=lambda state: state.get("started", 0))
    mine = {s["node"]: (node, s) for node, s in seen if s["job"] == newest["job"]}
    return _record(newest, [mine[index] for index in sorted(mine)], ssh)


def _record(
    newest: dict[str, Any], parts: Sequence[tuple[Node, dict[str, Any]]], ssh: Transport
) -> JobRecord:
    nodes = [
        NodeRecord(
            index=state["node"],
            name=node.name,
            host=node.host,
            user=node.user,
            port=node.port,
            address=ssh.config.of_node(node).host,
            python=node.python or "python3",
            first_rank=state["first_rank"],
            nproc=state["nproc"],
        )
        for node, state in parts
    ]
    config = ssh.config.file
    return JobRecord(
        job=newest["job"],
        experiment=newest["experiment"],
        state="running",
        command=[],
        nodes=nodes,
        started=newest.get("started", time.time()),
        head=experiment.this_head(),
        ssh_config=str(config.absolute()) if config else None,
    )
