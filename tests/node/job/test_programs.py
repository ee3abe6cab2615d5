"""Random programs, run by Python as torchrun runs it, and by us: no difference may be seen."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from orchestrator.node.job import processes
from tests.node.running import PATIENCE, PYTHON, Job, streams
from tests.programs import Program, comparable, programs

pytestmark = pytest.mark.slow

KEPT = "kept."  # files that programs leave open


def kept(directory: Path) -> dict[str, str]:
    found = {path.name: path.read_text() for path in directory.glob(f"{KEPT}*")}
    for name in found:
        (directory / name).unlink()
    return found


def under_python(directory: Path, rank: int, nproc: int) -> tuple[int, bytes]:
    """Exit code and output of `python -u program.py`, as torchrun starts a rank."""
    mark = f"{directory}/out."
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc)}
    code = subprocess.run(
        [PYTHON, "-u", str(directory / "program.py")],
        cwd=directory, stdin=subprocess.DEVNULL, start_new_session=True, check=False,
        env={**os.environ, **numbers, "CONTROL": mark, "PWD": str(directory)}, timeout=PATIENCE,
    ).returncode  # fmt: skip
    for pid, process in processes.everyone().items():  # what it left behind
        if f"CONTROL={mark}".encode() in processes.environment(pid):
            processes.send(process, signal.SIGKILL)
    output = Path(f"{mark}{rank}")
    said = output.read_bytes() if output.exists() else b""
    output.unlink(missing_ok=True)
    return 130 if code == -signal.SIGINT else code, said


def under_us(job: Job, directory: Path, start: str, nproc: int) -> dict[int, tuple[int, bytes]]:
    target = {"kind": "script", "name": str(directory / "program.py"), "args": []}
    job.start(job.spec(target, start=start, nproc=nproc, workdir=directory))
    ended = job.wait()
    assert ended["left"] == [] and job.living() == []
    output = streams(Path(job.run.log).read_bytes(), Path(job.run.ranks).read_bytes())
    return {rank: (code, output.get(str(rank), b"")) for rank, code in job.ended().items()}


numbers = itertools.count()


@given(program=programs())
@settings(
    max_examples=6,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_program_does_what_it_does_under_torchrun(
    home: Path, tmp_path: Path, program: Program
) -> None:
    compare(home, tmp_path / str(next(numbers)), program)


def compare(home: Path, directory: Path, program: Program) -> None:
    directory.mkdir()
    (directory / "program.py").write_text(program.text)
    nproc = 2 if program.good else 1  # the end of one rank would end the other sooner or later
    wanted = {}
    for rank in range(nproc):
        code, said = under_python(directory, rank, nproc)
        wanted[rank] = (code, comparable(said, program.text))
    files = kept(directory)
    for start in ("fork", "plain"):
        job = Job(home, f"{directory.name}-{start}-{os.getpid()}")
        try:
            ended = under_us(job, directory, start, nproc)
        finally:
            job.clear()
        seen = {
            rank: (code, comparable(said, program.text)) for rank, (code, said) in ended.items()
        }
        assert seen == wanted, start
        assert kept(directory) == files, start
