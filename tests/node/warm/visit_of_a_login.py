"""A head's visit in a login of its own: `python -IS visit_of_a_login.py LIBRARY`, orders on stdin.

It first becomes what a login may be (priority, limits, masks, signals that are ignored ...), and
then answers requests as the node's server does.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_TIMERSLACK, PR_SET_NO_NEW_PRIVS = 29, 38


def write(name: str, value: Any) -> None:
    Path(f"/proc/self/{name}").write_text(str(value))


def become(login: dict[str, Any]) -> None:
    """Be a process of such a login."""
    libc = ctypes.CDLL(None)
    for name, value in login.items():
        if name == "nice":
            os.setpriority(os.PRIO_PROCESS, 0, value)
        elif name in ("oom_score_adj", "coredump_filter"):
            write(name, value)
        elif name == "personality":
            libc.personality(value)
        elif name == "limits":
            for kind, soft, hard in value:
                resource.setrlimit(kind, (soft, hard))
        elif name == "CPUs":
            os.sched_setaffinity(0, value)
        elif name == "scheduler":
            os.sched_setscheduler(0, value, os.sched_param(0))
        elif name == "timer slack":
            libc.prctl(PR_SET_TIMERSLACK, value, 0, 0, 0)
        elif name == "no new privileges":
            libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        elif name == "ignored":
            for number in value:
                signal.signal(number, signal.SIG_IGN)
        elif name == "blocked":
            signal.pthread_sigmask(signal.SIG_BLOCK, value)
        elif name == "groups":
            os.setgroups(value)
        elif name == "directory":
            os.chdir(value)
        elif name != "umask":
            raise ValueError(name)


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    orders = json.load(sys.stdin)
    become(orders["login"])
    from orchestrator.node.server.visit import Visit
    from orchestrator.protocol.message import encode
    from orchestrator.protocol.requests.request import read_request

    os.umask(0o077)
    if orders["ready for"]:
        from orchestrator.node.job.run_directory import RunDir
        from orchestrator.node.warm import standbys

        run = RunDir(orders["ready for"], 0)
        standbys.start(run, os.environ, orders["login"]["umask"], 3600.0)
    visit = Visit(umask=orders["login"]["umask"])
    answers = [encode(visit.answer(read_request(each))) for each in orders["requests"]]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
