"""One node with our program unpacked, and a torch that is there at once: what waits is ours."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.job.run_directory import PartDir, RunDir
from orchestrator.node.server.session import ServerSession
from orchestrator.node.start import start as node_start
from orchestrator.node.warm import standbys
from orchestrator.node.warm.session import StandbySession
from orchestrator.node.warm.standbys import Standby
from orchestrator.protocol.events import Ended
from orchestrator.protocol.requests.start import Start, StartedHere
from orchestrator.protocol.spec import Spec
from tests.clusters.library import compiled
from tests.node.running import PATIENCE, PYTHON, STAND_IN, Job, alive, spec_of, wait_until

# Stands in for torch.distributed.run, where it does not matter what torchrun does.
RUN = f"""
import runpy, sys
def main():
    own = [word for word in sys.argv if word.startswith(("--nproc=", "--first=", "--log-dir="))]
    sys.argv = [{str(STAND_IN)!r}, "--fork", *own, sys.argv[-1]]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
TORCH = """
class cuda:
    is_initialized = staticmethod(lambda: False)
"""


class WarmNode:
    """A node on which jobs are started as a head has them started."""

    def __init__(self, directory: Path, new_job: Callable[..., Job], program: str) -> None:
        self.directory, self.new_job, self.program = directory, new_job, program
        self.library = directory / "library"
        self.packages = directory / "site-packages"
        self.jobs: list[Job] = []

    def package(self, name: str, text: str) -> Path:
        path = self.packages.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def edit(self, name: str, old: str, new: str, count: int = -1) -> None:
        """Change the program that this node runs."""
        path = self.library / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, count))

    def spec(self, job: Job, text: str, **fields: Any) -> Spec:
        path = self.directory / f"{job.run.job}.py"
        path.write_text(text)
        agent = [PYTHON, "-u", str(self.library / "orchestrator/node/job/ranks/fast_torchrun.py")]
        env = {"PYTHONPATH": str(self.packages), **fields.pop("env", {})}
        target = {"kind": "script", "name": str(path), "args": []}
        spec = job.spec(target, start="fork", workdir=self.directory, env=env)
        agent += ["--nproc=1", "--first=0", "--node-rank=0"]
        return spec_of({"warm": 600.0, **spec, "agent": agent, **fields})

    def start(self, text: str, of: str = "", **fields: Any) -> tuple[Job, StartedHere]:
        """Start an attempt of a new job, or of this one."""
        job = self.new_job()
        job.run = RunDir(of or job.run.job, 0, fields.get("attempt", 1))
        Path(PartDir(job.run.job, 0).spec).unlink(missing_ok=True)
        self.jobs.append(job)
        answer = ServerSession(umask=0o022).answer(Start(spec=self.spec(job, text, **fields)))
        assert isinstance(answer, StartedHere)
        return job, answer

    def run(self, text: str, **fields: Any) -> tuple[Job, StartedHere]:
        job, answer = self.start(text, **fields)
        wait_until(lambda: job.run.last(Ended), "the end of the job")
        wait_until(lambda: not alive(answer.supervisor), "the end of its supervisor")
        return job, answer

    def leave_standby(self, job: Job) -> None:
        """Run the server's steps after it has streamed this job to its end."""
        session = ServerSession(umask=0o022).of(StandbySession)
        session.follow(job.run)
        session.job_over()

    def keep_warm(self, job: Job) -> Standby:
        self.leave_standby(job)
        return self.ready()

    def ready(self) -> Standby:
        return wait_until(self.find_ready, "the standby")

    def find_ready(self) -> Standby | None:
        return next((each for each in standbys.find_standbys() if each.ready), None)


@pytest.fixture
def node(
    tmp_path: Path, new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> Iterator[WarmNode]:
    made = WarmNode(tmp_path, new_job, "")
    shutil.copytree(compiled(), made.library)
    made.package("torch.__init__", TORCH)
    made.package("torch._dynamo", "")
    made.package("torch.distributed.__init__", "")
    made.package("torch.distributed.run", RUN)
    monkeypatch.setattr(standbys, "LIBRARY", str(made.library))
    monkeypatch.setattr(node_start, "LIBRARY", str(made.library))
    # A busy machine is no failure.
    monkeypatch.setattr(standbys, "STANDBY_SECONDS", PATIENCE)
    monkeypatch.setattr(node_start, "TOLD_SECONDS", -PATIENCE)
    monkeypatch.setattr(sys, "executable", PYTHON)
    yield made
    for each in standbys.find_standbys():
        standbys.end_standby(each)
