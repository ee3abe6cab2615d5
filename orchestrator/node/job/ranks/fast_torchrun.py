"""torchrun for the fast start: like `python -m torch.distributed.run`, but ready sooner.

Stands alone: the ranks are forked from this process, so it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import time
from typing import Any

# To wait for the master; after that torchrun itself goes on waiting.
PATIENCE_SECONDS = 60.0
# Between two tries, at least and at most: 1,024 nodes are 200,000 packets a second at the least.
TRY_SECONDS = (0.005, 0.25)
SHARE_OF_WAIT = 0.05  # of the time waited so far, until the next try


def main() -> None:
    begin_path_here()
    run(import_torch())


def import_torch(*others: str) -> Any:
    """Return torchrun's module, imported with others that the ranks would import."""
    gc.disable()  # importing torch makes a million objects, none of them garbage: 0.1 s of 0.9
    torchrun = importlib.import_module("torch.distributed.run")
    for name in others:
        importlib.import_module(name)
    gc.freeze()  # forked ranks share these pages until one of them writes to them
    gc.enable()
    return torchrun


def begin_path_here() -> None:
    """Search this directory first, as -m does, unless PYTHONSAFEPATH is set (since Python 3.11)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()


def run(torchrun: Any) -> None:
    """Run torchrun, whose module this is, with sys.argv."""
    begin_path_here()
    note_the_time()
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    if given["--node-rank"] != "0":
        wait_for(given["--master-addr"], int(given["--master-port"]))
    torchrun.main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # To free what torch has made would take 0.1 s.


def note_the_time() -> None:
    """Leave a file whose time the supervisor reads: torch is imported."""
    with contextlib.suppress(KeyError, OSError):
        path = os.path.join(os.environ["ORCHESTRATOR_RUN"], "torch_ready")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def wait_for(address: str, port: int) -> None:
    """Wait until the master's agent listens; torchrun, refused once, waits half a second more."""
    pause, longest = TRY_SECONDS
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except OSError:
            time.sleep(pause)
            pause = min(longest, pause * (1 + SHARE_OF_WAIT))


if __name__ == "__main__":
    main()
