"""Starts a supervisor: `python <library> supervise JOB NODE`."""

from __future__ import annotations

import sys


def main() -> None:
    from orchestrator.node.job import supervisor

    command, job, node = sys.argv[1:]
    if command != "supervise":
        sys.exit(f"unknown command {command!r}")
    supervisor.main(job, node)
