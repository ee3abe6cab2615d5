"""Starts a supervisor: `python <library> supervise JOB NODE`; one that waits; or the sampler."""

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
    elif command == "standby":
        from orchestrator.node.warm import standby

        _, directory, fd, _ = words
        standby.main(directory, fd)
    elif command == "ahead":
        from orchestrator.node.warm import ahead

        ahead.main(words[0])
    else:
        sys.exit(f"unknown command {command!r}")
