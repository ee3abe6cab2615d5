"""Stop jobs and prove it: a receipt per node lists the killed processes and any that are left."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    EXIT_STOPPED,
    OrchestratorError,
)
from orchestrator.common.text import plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import ask_node
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow import verdict
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen import failures
from orchestrator.protocol.requests.follow import Stop, StopAll, StopReceipt
from orchestrator.protocol.timing import HEAD_LEAVES_SECONDS, STOP_PROOF_SECONDS
from orchestrator.records.experiment import NOT_STARTED, Experiment, JobRecord, NodeRecord
from orchestrator.records.outcome import Receipt

log = logging.getLogger(__name__)


def stop_job(
    ssh: Transport, record: JobRecord, nodes: Sequence[NodeRecord], grace: float
) -> list[Receipt]:
    def stop(node: NodeRecord) -> tuple[StopReceipt, ...]:
        wait = grace + STOP_PROOF_SECONDS
        reason = verdict.STOPPED_BY_USER
        order = Stop(
            job=record.job,
            part=node.part,
            attempt=record.attempt,
            why=reason,
            grace=grace,
            wait=wait,
        )
        return (ask_node(ssh, node, order, wait + 20),)

    log.info("stops job %s on %d nodes; grace %g s", record.job, len(nodes), grace)
    started = time.monotonic()
    results = fleet.map_parallel(nodes, stop)
    proofs = receipts_of([node.name for node in nodes], results, started, record.job)
    then = "then `orchestrator stop` again proves it"
    return [
        receipt.replace(error=f"{receipt.error}; {until_reached(record, node)}; {then}")
        if receipt.error
        else receipt
        for receipt, node in zip(proofs, nodes, strict=True)
    ]


def until_reached(record: JobRecord, node: NodeRecord) -> str:
    """Return a clause on what happens to the job on a node that cannot be reached."""
    doubt = "if it began there, " if node.in_doubt else ""
    if len(record.nodes) == 1:
        return f"{doubt}the job continues there until it can be reached"
    after = f"{record.launch.node_loss_timeout:g} s after it was cut off"
    return f"{doubt}its supervisor will end the job itself when its lease runs out ({after})"


def stop_everything(
    ssh: Transport, nodes: Sequence[Node], *, all_users: bool, only_show: bool = False
) -> list[Receipt]:
    wait, why = STOP_PROOF_SECONDS, "emergency stop"
    order = StopAll(why=why, grace=0.0, wait=wait, all_users=all_users, only_show=only_show)

    started = time.monotonic()
    results = fleet.map_parallel(nodes, lambda node: ask_node(ssh, node, order, 3 * wait).receipts)
    if only_show:
        # A machine that is listed under several names reports the same part under each.
        seen: set[tuple[str, str, int]] = set()
        for at, result in enumerate(results):
            if not isinstance(result, OrchestratorError):
                new = {(one.user, one.job, one.part): one for one in result}
                results[at] = tuple(one for part, one in new.items() if part not in seen)
                seen |= new.keys()
    return receipts_of([node.name for node in nodes], results, started, "")


def receipts_of(
    names: Sequence[str],
    results: Sequence[tuple[StopReceipt, ...] | OrchestratorError],
    started: float,
    job: str,
) -> list[Receipt]:
    took = time.monotonic() - started
    listed = []
    for name, result in zip(names, results, strict=True):
        if isinstance(result, OrchestratorError):
            listed.append(Receipt(node=name, job=job, took=took, error=result.what, fix=result.fix))
        else:
            listed += [Receipt(**vars(proof), node=name) for proof in result]
    return listed


def exit_code(receipts: Sequence[Receipt]) -> int:
    if any(receipt.error for receipt in receipts):
        return EXIT_NODE
    return EXIT_DONE if all(receipt.proved for receipt in receipts) else EXIT_FAILED


def receipts_to_text(receipts: Sequence[Receipt]) -> str:
    """Return a line per node; many nodes with the same outcome share one, with the longest time."""
    if len(receipts) > failures.MANY:
        longest = max(receipt.took for receipt in receipts)
        receipts = [receipt.replace(took=longest) for receipt in receipts]
    lines = failures.failure_lines(
        (each.node, describe_receipt(each), each.fix) for each in receipts
    )
    return "\n".join(lines or ["no job runs on these nodes"])


def preview_stop(receipts: Sequence[Receipt], experiments: Path) -> str:
    """Return the text on which jobs an emergency stop would end, with their nodes and users."""
    lost = [receipt for receipt in receipts if receipt.error]
    lines = failures.failure_lines((r.node, f"cannot be asked: {r.error}", r.fix) for r in lost)
    alive = [receipt for receipt in receipts if receipt.left]
    jobs: dict[tuple[str, str], list[Receipt]] = {}
    for receipt in alive:
        jobs.setdefault((receipt.user, receipt.job), []).append(receipt)
    for (user, job), parts in jobs.items():
        whose = f"{user}'s {job}" if user else job
        known = [part.experiment for part in parts if part.experiment.startswith("/")]
        where = ", ".join(failures.shorten_names(list(dict.fromkeys(part.node for part in parts))))
        count = count_processes(sum(len(part.left) for part in parts))
        lines.append(f"{whose}: {count} on {where}{f', of {known[0]}' if known else ''}")
    root = f"{experiments.absolute()}/"
    others = len({(r.user, r.job) for r in alive if is_elsewhere(r.experiment, experiments)})
    total = f"{plural(len(jobs), 'job')} on {plural(len({r.node for r in alive}), 'node')}"
    lines.append(f"{total}, {others} of these not of {root}" if others else total)
    return "\n".join(lines if alive or lines[1:] else ["no job runs on these nodes"])


def is_elsewhere(experiment: str, experiments: Path) -> bool:
    """Return True if an experiment is known and lies outside of this directory.

    A node that shares no disk with its head knows only the name.
    """
    if experiment.startswith("/"):
        return not Path(experiment).is_relative_to(experiments.absolute())
    return bool(experiment) and not (experiments / experiment).is_dir()


def count_processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def describe_receipt(receipt: Receipt) -> str:
    if receipt.error:
        return f"NOT ENDED: {receipt.error}"
    whose = f"{receipt.user}'s {receipt.job}" if receipt.user else receipt.job
    if not receipt.began:
        return f"{whose}: it never began there, and never will; nothing left"
    if not receipt.known:
        return (
            f"{whose}: NOTHING IS KNOWN of it there, so nothing is proved: another login started"
            " it, the node was installed again, or this address is another machine's now"
        )
    if receipt.left:
        return f"{whose}: STILL ALIVE: {', '.join(map(str, receipt.left))}"
    if receipt.gpu_memory:
        held = ", ".join(f"{pid} ({much})" for pid, much in receipt.gpu_memory.items())
        return f"{whose}: GPU MEMORY STILL HELD by dead processes: {held}; it may need a GPU reset"
    parts = ["ended, nothing left"]
    many = count_processes(len({**receipt.ended, **receipt.killed}))
    # Without entries the part had ended before.
    if receipt.ended:
        how = f", {len(receipt.killed)} of them killed" if receipt.killed else ""
        parts[0] = f"ended {many}{how} in {receipt.took:.1f} s, nothing left"
    if receipt.port:
        state = "free" if receipt.port.free else "in use by a process that is not of this job"
        parts.append(f"port {receipt.port.number} {state}")
    if receipt.shared_memory:
        parts.append(f"shared memory stays there: {', '.join(receipt.shared_memory)}")
    if receipt.gpu_unknown:
        parts.append(f"GPU memory not checked: {receipt.gpu_unknown}")
    return f"{whose}: {'; '.join(parts)}"


def never_began(receipt: Receipt, node: NodeRecord | None) -> bool:
    """Return True if a login's ignorance of a job proves that its part never began there.

    It does if the start request was never answered, as a start first creates the run's directory.
    The parent directory has to be the one that the launch found, on the same machine.
    """
    if node is None or receipt.known or receipt.error:
        return False
    same = bool(node.runs) and receipt.runs == node.runs
    return node.state == NOT_STARTED or (node.in_doubt and same)


def conclude_stop(experiment: Experiment, receipts: list[Receipt]) -> tuple[list[Receipt], str]:
    """Write the receipts to job.json, and the end of a job that no head follows.

    Returns the receipts, corrected by the job's record, and the reason why they could not be
    written ("" if they were).
    """
    deadline = time.monotonic() + HEAD_LEAVES_SECONDS
    # A head that follows the job sees the end by itself and releases the lock.
    while experiment.lock() is not None:
        if time.monotonic() > deadline:
            return receipts, f"another head holds {experiment.name}"
        time.sleep(0.05)
    record = experiment.read_record()
    places = {node.name: node for node in record.nodes}
    receipts = [r.replace(began=not never_began(r, places.get(r.node))) for r in receipts]
    over = {receipt.node for receipt in receipts if receipt.proved}
    nodes = [replace(node, state="ended") if node.name in over else node for node in record.nodes]
    kept = {**record.receipts, **{receipt.node: receipt for receipt in receipts}}
    record = replace(record, nodes=nodes, receipts=kept)
    if not record.over and exit_code(receipts) == EXIT_DONE:
        now = time.time()
        record = replace(
            record,
            state="stopped",
            exit_code=EXIT_STOPPED,
            ended=now,
            verdict=verdict.stopped_verdict("orchestrator stop", now),
        )
    try:
        experiment.write_record(record)
    except OSError as error:
        return receipts, f"{experiment.path}: {error.strerror}"
    finally:
        experiment.unlock()
    return receipts, ""
