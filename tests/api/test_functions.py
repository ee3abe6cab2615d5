"""What of the calling program is sent whole, and what by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import multiprocessing, sys
from orchestrator.api.functions import send_program_whole
from orchestrator.node import pickled_functions
def helps(x):
    return x + 1
def work(x):
    return helps(x) * 10
def child(where):
    send_program_whole()
    open(where, "wb").write(pickled_functions.dumps((work, (3,), {})))
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    process = multiprocessing.Process(target=child, args=(sys.argv[2],))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
RANK = """
import sys, cloudpickle
function, args, kwargs = cloudpickle.loads(sys.stdin.buffer.read())
print(function(*args, **kwargs))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_the_program_sends_its_functions(method: str, tmp_path: Path) -> None:
    """Where it was spawned it has the program under another name, which no rank knows."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", method, tmp_path / "call"]
    subprocess.run(command, check=True)
    call = (tmp_path / "call").read_bytes()
    done = subprocess.run([sys.executable, "-c", RANK], input=call, capture_output=True, check=True)
    assert done.stdout == b"40\n"
