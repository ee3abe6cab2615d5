"""Starts a supervisor, `python <library> supervise JOB NODE`, or the sampler."""

from __future__ import annotations

import sys


def main() -> None:
    command, *words = sys.argv[1:]
    if command == "supervise":
        from orchestrator.node.job import supervisor

        job, node = words
        supervisor.main(job, node)
    elif command == "sample":
        from orchestrator.node.machine import sampler

        sampler.main(*words)
    elif command == "forked":
        from orchestrator.node.warm import supervise

        agent, control, _, job, node = words
        supervise.main(agent, control, job, node)
    else:
        sys.exit(f"unknown command {command!r}")
