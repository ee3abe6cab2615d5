"""Two ranks that talk over gloo, forked from one Python that has imported torch once.

`python -m tests.engine.pair MODULE FUNCTION DIRECTORY` calls FUNCTION(rank, DIRECTORY) in each. A
rank that raises ends both, so that no test waits for a partner that is gone.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

WORLD = 2


def run(function: Callable[[int, Path], None], directory: Path) -> str:
    """What both ranks printed. The function is one of a module, so that the ranks can find it."""
    words = [sys.executable, "-m", "tests.engine.pair", function.__module__, function.__name__]
    done = subprocess.run(
        [*words, str(directory)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def main(module: str, name: str, directory: str) -> int:
    import torch._dynamo  # the optimizer would import it in every rank, 0.4 s each
    import torch.distributed as dist
    import torch.distributed.fsdp  # noqa: F401

    function = getattr(importlib.import_module(module), name)
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                store = dist.FileStore(str(Path(directory, f"store_{name}")), WORLD)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
                function(rank, Path(directory))
                dist.destroy_process_group()
                code = 0
            except Exception:  # noqa: BLE001 (told to the test)
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
