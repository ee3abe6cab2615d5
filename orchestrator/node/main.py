"""Starts a supervisor, `python <library> supervise JOB PART ATTEMPT`, or the sampler."""

from __future__ import annotations

import sys


def main() -> None:
    command, *words = sys.argv[1:]
    if command == "supervise":
        from orchestrator.node.job import supervisor

        job, part, attempt = words
        supervisor.main(job, part, attempt)
    elif command == "sample":
        from orchestrator.node.machine import sampler

        sampler.main(*words)
    elif command == "forked":
        from orchestrator.node.warm import supervise

        agent, control, _, *words = words
        supervise.main(agent, control, *words)
    else:
        sys.exit(f"unknown command {command!r}")
