"""torchrun for the fast start: like `python -m torch.distributed.run`, but ready sooner.

Stands alone: the ranks are forked from this process, so it imports nothing of this package.
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

# After this time torchrun itself waits for the master. No table of the package is imported here.
MASTER_SECONDS = 60.0
# Minimum and maximum pause between two tries. At the minimum, 1,024 nodes send 200,000 packets/s.
TRY_SECONDS = (0.005, 0.25)
# The pause before the next try grows by this share of the last one.
SHARE_OF_WAIT = 0.05


def main() -> None:
    begin_path_here()
    run(import_torch())


def import_torch(*others: str) -> Any:
    """Return torchrun's module, imported with others that the ranks would import."""
    # Importing torch makes a million objects and no garbage: collection would take 0.1 s of 0.9.
    gc.disable()
    torchrun = importlib.import_module("torch.distributed.run")
    for name in others:
        importlib.import_module(name)
    # Forked ranks share these pages until one of them writes to them.
    gc.freeze()
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
    # Freeing torch's objects would take 0.1 s.
    os._exit(0)


def note_the_time() -> None:
    """Create a file whose time tells the supervisor when torch was imported."""
    with contextlib.suppress(KeyError, OSError):
        path = os.path.join(os.environ["ORCHESTRATOR_RUN"], "torch_ready")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def wait_for(address: str, port: int) -> None:
    """Wait until the master's agent listens; torchrun, refused once, waits half a second more."""
    pause, longest = TRY_SECONDS
    deadline = time.monotonic() + MASTER_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except OSError:
            time.sleep(pause)
            pause = min(longest, pause * (1 + SHARE_OF_WAIT))


if __name__ == "__main__":
    main()
