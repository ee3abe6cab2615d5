"""torchrun for the fast start: like `python -m torch.distributed.run`, but ready sooner.

Stands alone: the ranks are forked from this process, so it imports nothing of ours.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import importlib.machinery
import json
import os
import socket
import sys
import threading
import time
import types
from typing import Any

# To wait for the master; after that torchrun itself goes on waiting.
PATIENCE_SECONDS = 60.0
# Between two tries, at least and at most: 1,024 nodes are 200,000 packets a second at the least.
TRY_SECONDS = (0.005, 0.25)
SHARE_OF_WAIT = 0.05  # of the time waited so far, until the next try
LAST_WORDS = datetime.timedelta(seconds=2)  # the master waits so long for others that leave


def main() -> None:
    begin_path_here()
    run(import_torch(os.environ.get("ORCHESTRATOR_RUN", "")))


def import_torch(run: str) -> Any:
    """Return torchrun's module, imported with what the ranks of this run would import."""
    gc.disable()  # importing torch makes a million objects, none of them garbage: 0.1 s of 0.9
    torchrun = importlib.import_module("torch.distributed.run")
    import_ahead(run)
    gc.freeze()  # forked ranks share these pages until one of them writes to them
    gc.enable()
    return torchrun


def begin_path_here() -> None:
    """Search this directory first, as -m does, unless PYTHONSAFEPATH is set (since Python 3.11)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()


def import_ahead(run: str) -> None:
    """Import here what each rank of a program that trains would import for itself."""
    name = "torch_env"
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    torch_env: Any = types.ModuleType(name)  # without a trace in sys.modules: ranks would see it
    importlib.machinery.SourceFileLoader(name, path).exec_module(torch_env)
    with contextlib.suppress(Exception):  # whoever needs it will hear what is wrong with it
        with open(os.path.join(run, "spec.json"), "rb") as file:
            spec = json.load(file)
        if torch_env.will_train(spec["target"], spec["workdir"], os.environ):
            importlib.import_module(torch_env.OF_OPTIMIZERS)


def run(torchrun: Any) -> None:
    """Run torchrun, whose module this is, with sys.argv."""
    begin_path_here()
    note_the_time()
    ask_no_name_server()
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    is_master = given["--node-rank"] == "0"
    leave_in_order(is_master)
    if not is_master:
        wait_for(given["--master-addr"], int(given["--master-port"]))
    torchrun.main()
    leave()


def leave() -> None:
    """End as the interpreter does, but for freeing what torch has made: 0.1 s and more."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def ask_no_name_server() -> None:
    """Let torchrun's events, which nobody reads, name this machine without its domain.

    It asks for that at each: where no name server answers, six times 10 s in the smallest job.
    """
    api: Any = sys.modules.get("torch.distributed.elastic.agent.server.api")
    if hasattr(api, "_get_fq_hostname"):
        api._get_fq_hostname = socket.gethostname


def leave_in_order(is_master: bool) -> None:
    """Let the master's agent leave last when the job has ended well: the store ends with it.

    Whoever still waits there for the answer that all have ended would write a page of C++ frames
    instead, for which it looks for a second.
    """
    api: Any = sys.modules.get("torch.distributed.elastic.agent.server.api")
    wait_for_the_end = getattr(getattr(api, "SimpleElasticAgent", None), "_exit_barrier", None)
    if wait_for_the_end is None:
        return

    def and_leave(agent: Any) -> None:
        wait_for_the_end(agent)
        with contextlib.suppress(Exception):  # it has ended well, whoever cannot be waited for
            store, nodes = agent._store, agent._worker_group.group_world_size
            if store.add("orchestrator/left", 1) == nodes:
                store.set("orchestrator/all left", "")
            if is_master:
                store.wait(["orchestrator/all left"], LAST_WORDS)

    api.SimpleElasticAgent._exit_barrier = and_leave


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
