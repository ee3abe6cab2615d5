"""`orchestrator top`: all nodes, who uses them, and how far each job is, live or once."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from orchestrator.config.launch import Where
from orchestrator.errors import EXIT_DONE, EXIT_NODE
from orchestrator.head.commands.stop import end_job
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.follow.node_logs import log_files
from orchestrator.head.follow.stop import to_text as to_words
from orchestrator.head.held.transport import HeldTransport
from orchestrator.head.inventory.node_list import read_nodes
from orchestrator.head.screen import output
from orchestrator.head.screen.log_reader import tail
from orchestrator.head.top import table
from orchestrator.head.top.sample import JobSample, Sample, Watch
from orchestrator.records import experiment as experiments

LINES = 200  # of each node's log


@dataclass(frozen=True)
class TopOptions:
    """Say how the nodes are shown: once, as JSON, again and again."""

    once: bool
    as_json: bool
    watch: bool
    seconds: float


def top(where: Where, options: TopOptions) -> int:
    transport = HeldTransport(SshConfig(where.ssh_config))
    nodes = read_nodes(where.node_list)
    watch = Watch(transport, nodes, where.experiments, where.trust_record)
    with closing(watch):
        if options.as_json or options.once or not sys.stdout.isatty():
            return tell(watch, options)
        return live(where, watch, options.seconds)


def tell(watch: Watch, options: TopOptions) -> int:
    """Print what is there now; with --json --watch a line for each look until Ctrl-C."""
    while True:
        sample = watch.look()
        if options.as_json:
            data = table.to_json(sample)
            output.tell(json.dumps(data, indent=None if options.watch else 1))
        else:
            output.tell(to_text(sample))
        if not options.watch:
            lost = any(node.checkup is None for node in sample.nodes)
            return EXIT_NODE if lost else EXIT_DONE
        time.sleep(options.seconds)


def to_text(sample: Sample) -> str:
    look = output.look()
    nodes = [list(table.NODE_HEADINGS), *table.node_rows(sample)]
    jobs = [list(table.JOB_HEADINGS), *table.job_rows(sample)]
    parts = [output.table(nodes, look, headed=True)]
    parts.append(output.table(jobs, look, headed=True) if sample.jobs else "no job runs there")
    return "\n\n".join(parts)


def live(where: Where, watch: Watch, seconds: float) -> int:
    from orchestrator.head.top.screen import Top  # textual takes 0.2 s

    def lines_of(job: JobSample) -> Sequence[str]:
        return log_lines(where, job)

    def stop(job: JobSample) -> str:
        return end(where, job)

    Top(watch.look, seconds, lines_of, stop).run()
    return EXIT_DONE


def log_lines(where: Where, job: JobSample) -> Sequence[str]:
    """Return the last lines of each node's log, as they are here."""
    found = experiments.find(where.experiments, job.experiment or job.job)
    if found is None:
        return [f"{job.job} was not started from {where.experiments}: its logs are not here"]
    record = found.read_record()
    lines = []
    for log in log_files(found, record.nodes):
        lines += [f"node {log.node}: {line}" for line in tail(log, LINES, None)]
    return lines or ["nothing was printed yet"]


def end(where: Where, job: JobSample) -> str:
    """End a job as `orchestrator stop` does, and return its receipts in words."""
    ended = end_job(where, job.experiment or job.job, None)
    return f"{job.job} is over already" if ended.receipts is None else to_words(ended.receipts)
