"""`orchestrator stop` and `emergency-stop`: end jobs, and print a receipt for every node."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from orchestrator.common import logs
from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_NODE
from orchestrator.config.launch import Where
from orchestrator.config.parse import waiting_time
from orchestrator.head.follow import stop as stopping
from orchestrator.head.nodes.node_list import read_nodes
from orchestrator.head.screen import output
from orchestrator.head.status import status
from orchestrator.head.status.status import find_job, transport_without_record
from orchestrator.protocol.message import encode_value
from orchestrator.records.experiment import JobRecord, NodeRecord
from orchestrator.records.outcome import Receipt


@dataclass(frozen=True)
class StopResult:
    """The result of stopping a job."""

    record: JobRecord
    # None: the job had ended before.
    receipts: list[Receipt] | None
    # The reason why job.json could not be updated.
    problem: str = ""


def may_run_on(record: JobRecord, node: NodeRecord) -> bool:
    """Return True if processes of the job may still run on the node.

    They may outlive the job on a lost node, after its supervisor was killed, or where its receipt
    proves no end.
    """
    killed = record.verdict is not None and record.verdict.kind == "supervisor"
    told = record.receipts.get(node.name)
    in_doubt = told is not None and not told.proved
    return not record.over or killed or node.state == "lost" or in_doubt


def end_job(where: Where, wanted: str | None, grace: float | None) -> StopResult:
    """End a job on all its nodes; the default of `grace` is the launch's own."""
    if grace is not None:
        waiting_time("--grace", grace)
    job = find_job(where, wanted)
    record = job.record
    grace = record.launch.grace if grace is None else grace
    receipts = job.backend.stop(job.experiment, record, grace)
    if receipts is not None:
        return StopResult(record, receipts)
    nodes = [node for node in record.nodes if may_run_on(record, node)]
    if not nodes:
        return StopResult(record, None)
    job.experiment.check_launched(record)
    words = "process %d stops the job on %d nodes; grace %g s"
    logs.append_line(job.experiment.head_log, __name__, words, os.getpid(), len(nodes), grace)
    if record.launch.max_restarts and not record.over:
        job.experiment.forbid_restarts()
    receipts = stopping.stop_job(job.transport, record, nodes, grace)
    while (now := job.experiment.read_record()).attempt != record.attempt and not now.over:
        # The head was starting the next attempt; no later one can start.
        record = now
        receipts = stopping.stop_job(job.transport, record, record.nodes, grace)
    for receipt in receipts:
        words = receipt.error or stopping.describe_receipt(receipt)
        logs.append_line(job.experiment.head_log, __name__, "%s: %s", receipt.node, words)
    return StopResult(record, *stopping.conclude_stop(job.experiment, receipts))


def stop_job(where: Where, wanted: str | None, *, grace: float | None) -> int:
    ended = end_job(where, wanted, grace)
    if ended.receipts is None:
        over = f"orchestrator: {ended.record.job} has ended already ({ended.record.state})"
        output.print_result([], lambda _: over)
        return EXIT_DONE
    code = show_receipts(ended.receipts)
    if ended.problem:
        output.complain(f"orchestrator: these receipts are not in job.json: {ended.problem}")
    return code


def emergency_stop(
    where: Where, *, all_users: bool, yes: bool = False, dry_run: bool = False
) -> int:
    """End all jobs; on a terminal, show them first and ask."""
    ssh = transport_without_record(where)
    nodes = read_nodes(where.node_list)
    # Inside first: from outside, a container's processes are another user's, or not to be seen.
    inside = status.containers_of(nodes, where, status.is_open)

    def everywhere(*, only_show: bool) -> list[Receipt]:
        return [
            receipt
            for places in (inside, nodes)
            for receipt in stopping.stop_everything(
                ssh, places, all_users=all_users, only_show=only_show
            )
        ]

    asks = sys.stdin.isatty() and not (yes or output.as_json())
    if dry_run or asks:
        alive = everywhere(only_show=True)
        words = stopping.preview_stop(alive, where.experiments)
        output.print_result(encode_value(alive), lambda _: words)
        if dry_run:
            return EXIT_NODE if any(receipt.error for receipt in alive) else EXIT_DONE
        if any(receipt.left for receipt in alive) and not output.user_agrees("end all of these?"):
            output.complain("nothing was ended")
            return EXIT_FAILED
    return show_receipts(everywhere(only_show=False))


def show_receipts(receipts: list[Receipt]) -> int:
    output.print_result(encode_value(receipts), lambda _: stopping.receipts_to_text(receipts))
    return stopping.exit_code(receipts)
