"""Stands in for torchrun where torchrun is not the point: it starts in 0.1 s instead of 2.

As torchrun does: ranks are forked by multiprocessing, are interrupted when it dies, and hand a
return value back; or are started afresh, in a session of their own. SIGTERM is passed on; one rank
that fails ends the others. A forked rank has ended once no process holds its pipe.
"""

import argparse
import atexit
import ctypes
import importlib
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--import", dest="module")
    parser.add_argument("--talks", action="store_true")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--log-dir")
    parser.add_argument("program")
    return parser.parse_args()


def environment(given: argparse.Namespace, local: int) -> dict[str, str]:
    error_file = Path(given.log_dir, str(local), "error.json")
    error_file.parent.mkdir(parents=True, exist_ok=True)
    return {
        "RANK": str(given.first + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(given.first + given.nproc),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


class Forked:
    """A rank as `--start-method fork` makes it: done when its return value came."""

    def __init__(self, given: argparse.Namespace, local: int) -> None:
        context = multiprocessing.get_context("fork")
        self.returned: Any = context.SimpleQueue()
        self.process = context.Process(target=self.run, args=(given, local))
        self.process.start()
        self.pid = self.process.pid

    def run(self, given: argparse.Namespace, local: int) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
        os.environ.update(environment(given, local))
        sys.argv = [given.program]
        runpy.run_path(given.program, run_name="__main__")
        self.returned.put(None)

    def poll(self) -> int | None:
        if self.returned.empty():
            return self.process.exitcode or None
        ended = multiprocessing.connection.wait([self.process.sentinel], 0)
        return self.process.exitcode if ended else None


class Started:
    def __init__(self, given: argparse.Namespace, local: int) -> None:
        env = {**os.environ, **environment(given, local)}
        self.process = subprocess.Popen(
            [sys.executable, "-u", given.program], env=env, start_new_session=True
        )
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()


class Told(Exception):
    """SIGTERM."""


def told(*_: object) -> None:
    raise Told


def main() -> int:
    given = options()
    own = tempfile.TemporaryDirectory()
    signal.signal(signal.SIGTERM, told)
    if given.module:
        importlib.import_module(given.module)
    if given.talks:
        print("at the beginning", file=sys.stderr)
        atexit.register(print, "at the end", file=sys.stderr)
    ranks = [(Forked if given.fork else Started)(given, local) for local in range(given.nproc)]
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            if any(codes):
                return close(ranks)
            if None not in codes:
                return 0 if Path(own.name).is_dir() else 9
            time.sleep(0.02)
    except Told:
        return close(ranks)


def close(ranks: list[Any]) -> int:
    for rank in ranks:
        if rank.process.exitcode is None if isinstance(rank, Forked) else rank.poll() is None:
            os.kill(rank.pid, signal.SIGTERM)
    for rank in ranks:
        rank.process.join() if isinstance(rank, Forked) else rank.process.wait()
    return 1


if __name__ == "__main__":
    sys.exit(main())
