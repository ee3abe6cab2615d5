"""Stands in torchrun's place where a program starts its ranks by itself: one process on each node.

Takes the options that torchrun gets, and imports no torch: the program may need none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Run the keeper of the node's one process, and end with it: with 1 where it failed."""
    *words, keeper = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words)
    node = options["--node-rank"]
    place = {
        **{"RANK": node, "WORLD_SIZE": options["--nnodes"]},
        **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": node},
        **{"MASTER_ADDR": options["--master-addr"], "MASTER_PORT": options["--master-port"]},
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is somebody to tell
    process = subprocess.Popen(
        [sys.executable, "-u", keeper],
        env={**os.environ, **place},
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED),  # noqa: PLW1509
    )
    for number in FORWARDED:
        signal.signal(number, lambda number, _: process.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    sys.exit(1 if process.wait() else 0)


if __name__ == "__main__":
    main()
