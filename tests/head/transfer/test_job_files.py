"""Nodes get what they lack of what the job's master wrote, attempt for attempt.

The nodes are real ones without the network between head and node: a session each, directories of
their own.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.common.errors import CheckFailed, NodeError, StoppedEarly
from orchestrator.head.transfer import job_files
from orchestrator.head.transfer.job_files import JobPeer, bring_job_files, bring_metrics
from orchestrator.node.job import resume_dir
from orchestrator.node.job.run_directory import PartDir
from orchestrator.node.transfer import outputs
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import Offer, Outputs, ReadFile
from tests.head.heard import hearing
from tests.head.transfer.nodes import Channel
from tests.node.start.test_next_spec import FIRST
from tests.records.one_node import NODE

JOB = "run-1"
OWN = Outputs(job=JOB, part=1, own=True)


class Machine(Channel):
    """One node: its working directory, and the server that a head talks to."""

    def __init__(self, index: int, name: str, place: Path) -> None:
        super().__init__()
        self.index, self.name, self.work = index, name, place / name
        self.work.mkdir(parents=True)
        self.part = PartDir(JOB, index)
        Path(self.part.experiment, "outputs").mkdir(parents=True)
        env = {"ORCHESTRATOR_EXPERIMENT": self.part.experiment}
        self.part.write_spec(FIRST.replace(node=index, env=env, workdir=str(self.work)))
        self.resume = Path(resume_dir.make_resume_dir(self.part))
        # A test sets what happens before this node answers a request.
        self.before: Callable[[Request[Any]], object] = lambda request: None

    def ask(self, request: Request[Any], seconds: float) -> Any:
        self.before(request)
        return super().ask(request, seconds)

    def write(self, name: str, content: str, at: float = 0.0) -> None:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        if at:
            os.utime(path, (at, at))
            os.utime(path.parent, (at, at))

    def has(self) -> dict[str, str]:
        """Return what a program would see."""
        found = [path for path in sorted(self.work.rglob("*")) if not path.is_dir()]
        return {str(path.relative_to(self.work)): path.read_text() for path in found}


class Job:
    """A job whose nodes have one letter each; the first is its master."""

    def __init__(self, names: str, place: Path) -> None:
        self.machines = {name: Machine(at, name, place) for at, name in enumerate(names)}
        self.last, self.shared = list(names), False

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def peer(self, name: str) -> JobPeer:
        one = self.machines[name]
        return JobPeer(name, cast("Any", one), (JOB, one.index), self.shared)

    def again(
        self, names: str, stopped: Callable[[], None] = lambda: None, left: str = ""
    ) -> list[str]:
        """Bring these nodes what they lack, begin the next attempt; return what is said.

        Others are there that it leaves.
        """
        reach = lambda name: self.peer(name) if name in left else None  # noqa: E731
        with hearing() as said:
            bring_job_files([*map(self.peer, names)], self.last, reach, (), stopped)
        self.last = list(names)
        return said


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(resume_dir, "MEMORY", str(tmp_path / "shm"))
    yield tmp_path


def test_files_of_rank_0_reach_all_nodes_each_attempt(place: Path) -> None:
    job = Job("abc", place)
    job["a"].write("ckpt.pt", "step 40", 2e9)
    (said,) = job.again("abc")
    assert said.startswith("b, c lacked ckpt.pt (7 B) of a: came in "), said
    assert all(one.has() == {"ckpt.pt": "step 40"} for one in job.machines.values())
    assert (job["b"].work / "ckpt.pt").stat().st_mtime == 2e9, "a program may ask for the newest"
    job["a"].write("ckpt.pt", "step 80")
    assert "lacked ckpt.pt" in job.again("abc")[0]
    assert all(one.has() == {"ckpt.pt": "step 80"} for one in job.machines.values())
    for one in job.machines.values():
        one.asked.clear()
    assert job.again("abc") == []
    assert [one.asked for one in job.machines.values()] == [["job_files"], ["offer"], ["offer"]]


def test_masters_file_wins_without_merge_or_delete(place: Path) -> None:
    job = Job("ab", place)
    job["a"].write("train.log", "of a")
    (place / "input").write_text("of b")
    (job["b"].work / "train.log").symlink_to(place / "input")
    job["b"].write("rank1.pt", "of b")
    job.again("ab")
    assert job["b"].has() == {"train.log": "of a", "rank1.pt": "of b"}
    assert (place / "input").read_text() == "of b"
    assert job["a"].has() == {"train.log": "of a"}
    (job["a"].work / "train.log").unlink()
    assert job.again("ab") == []
    assert job["b"].has() == {"train.log": "of a", "rank1.pt": "of b"}


def test_files_older_than_job_are_not_carried(place: Path) -> None:
    job = Job("ab", place)
    job["a"].write("old.pt", "old")
    os.utime(job["a"].part.spec, (2e9, 2e9))
    assert job.again("ab") == []
    assert job["b"].has() == {}


def test_step_directories_and_latest_link_are_carried(place: Path) -> None:
    job = Job("ab", place)
    for step in (100, 20):
        job["a"].write(f"runs/step-{step}/model.pt", f"{step}", 2e9 + step)
    (job["a"].work / "runs/latest").symlink_to(job["a"].work / "runs/step-100")
    (job["a"].work / "runs/out").symlink_to("/etc")
    job["a"].write("runs/.wandb/x", "hidden")
    job["a"].write(".hidden", "hidden")
    job["a"].write("runs/dcp/.metadata", "what is where")
    job["a"].write("__pycache__/x.pyc", "code")
    job.again("ab")
    assert str((job["b"].work / "runs/latest").readlink()) == "step-100"
    times = [(job["b"].work / f"runs/step-{step}").stat().st_mtime for step in (20, 100)]
    assert times == [2e9 + 20, 2e9 + 100], "the newest directory there is the newest here"
    found = {str(path.relative_to(job["b"].work)) for path in job["b"].work.rglob("*")}
    assert {path for path in found if "step" not in path} == {
        "runs", "runs/latest", "runs/dcp", "runs/dcp/.metadata",
    }  # fmt: skip
    job["a"].work.joinpath("runs/latest").unlink()
    job["a"].work.joinpath("runs/latest").symlink_to("step-20")
    job.again("ab")
    assert str((job["b"].work / "runs/latest").readlink()) == "step-20"


def test_resume_directory_keeps_own_files_of_node(place: Path) -> None:
    job = Job("ab", place)
    (job["a"].resume / "state.pt").write_text("of a")
    (job["a"].resume / "state_0.pt").write_text("40")
    (job["b"].resume / "state.pt").write_text("of b")
    (job["b"].resume / "state_1.pt").write_text("40")
    job.again("ab")
    (job["a"].resume / "state_0.pt").write_text("step 80")  # the copy of 40 is no file of b's own
    (job["a"].resume / "trainer0.x").write_text("brought by the Trainer's ranks")
    job.again("ab")
    assert {path.name: path.read_text() for path in job["b"].resume.iterdir()} == {
        "state.pt": "of b", "state_0.pt": "step 80", "state_1.pt": "40",
    }  # fmt: skip
    assert not (job["a"].resume / "state_1.pt").exists()


def shared(job: Job, place: Path) -> Path:
    """Put all nodes on one disk that also holds the head's experiment."""
    work, experiment = place / "all", place / "all/experiments/run"
    (experiment / "outputs").mkdir(parents=True)
    (experiment / "config.yaml").touch()
    for one in job.machines.values():
        Path(one.part.spec).unlink()
        env = {"ORCHESTRATOR_EXPERIMENT": str(experiment)}
        one.part.write_spec(FIRST.replace(node=one.index, env=env, workdir=str(work)))
    return work


def test_resume_directory_is_per_node_on_shared_disk(place: Path) -> None:
    """Ranks that keep their state there go on, and those of other nodes find the master's."""
    job = Job("ab", place)
    work = shared(job, place)
    (work / "model.pt").write_text("seen by all")
    for rank, name in enumerate("ab"):
        (job[name].resume / f"state_{rank}.json").write_text("20")
    (said,) = job.again("ab")
    assert said.startswith("b lacked state_0.json"), said
    assert {path.name for path in job["b"].resume.iterdir()} == {"state_0.json", "state_1.json"}


def test_file_not_yet_visible_on_network_disk_is_sent(place: Path) -> None:
    """A rank that misses a checkpoint would start from step 0 beside ranks that resume."""
    job = Job("ab", place)
    work = shared(job, place)
    (work / "ckpt.pt").write_text("40")
    (work / "latest").symlink_to("ckpt.pt")
    before = (work / "ckpt.pt").stat()
    own = job["b"].ask

    def late(request: Request[Any], seconds: float) -> Any:
        if not isinstance(request, Offer):
            return own(request, seconds)
        # The disk shows an older file and link to this node for as long as it compares.
        for name, old in (("ckpt.pt", "30"), ("latest", "older.pt")):
            (work / name).rename(work / f".{name}")
            (work / name).symlink_to(old) if name == "latest" else (work / name).write_text(old)
        answer = own(request, seconds)
        (work / ".ckpt.pt").replace(work / "ckpt.pt")
        return answer

    cast("Any", job["b"]).ask = late
    (said,) = job.again("ab")
    assert said.startswith("b lacked ckpt.pt (2 B) of a"), said
    after = (work / "ckpt.pt").stat()
    assert (work / "latest").read_text() == "40" and after.st_mtime_ns == before.st_mtime_ns
    assert after.st_ino != before.st_ino, "it was written by b, whose kernel knows it from then on"


def test_replacement_node_gets_all_files(place: Path) -> None:
    """A new one gets all; of a lost master what others had of it is left, and goes on to others."""
    job = Job("abc", place)
    job.last = ["a", "b"]
    job["a"].write("ckpt.pt", "step 40")
    job.again("ab")
    job["a"].write("ckpt.pt", "step 80")
    said = job.again("bc")
    assert said[0] == "a is lost, with what it alone had: ranks find what b has"
    assert said[1].startswith("c lacked ckpt.pt")
    assert job["b"].has() == job["c"].has() == {"ckpt.pt": "step 40"}
    job["b"].write("ckpt.pt", "step 60")
    job.again("abc")
    assert job["a"].has() == job["c"].has() == {"ckpt.pt": "step 60"}


def test_replaced_master_gives_its_files(place: Path) -> None:
    job = Job("abcd", place)
    job.last = ["a", "b"]
    job["a"].write("ckpt.pt", "step 40")
    assert job.again("cd", left="a")[0].startswith("c, d lacked ckpt.pt")
    assert job["c"].has() == job["d"].has() == {"ckpt.pt": "step 40"}


def test_files_of_nodes_all_lost_are_not_carried(place: Path) -> None:
    job = Job("abc", place)
    job.last = ["a", "b"]
    job["a"].write("ckpt.pt", "step 40")
    for name in "ab":
        shutil.rmtree(job[name].part.home)
    (said,) = job.again("ca", left="b")
    assert said.startswith("WARNING: a, b are lost") and job["c"].has() == {}


@pytest.mark.parametrize("why", ["no room", "changed"])
def test_failed_copy_ends_attempt(place: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    job = Job("ab", place)
    job["a"].write("c-40/model.pt", "weights")
    if why == "no room":
        full = "orchestrator.common.folder.PartialFile.put"
        monkeypatch.setattr(full, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    else:

        def changes(request: Request[Any]) -> None:
            if isinstance(request, ReadFile):
                job["a"].write("c-40/model.pt", "another")

        job["a"].before = changes
    with pytest.raises(CheckFailed, match="its ranks would start from the beginning") as refusal:
        job.again("ab")
    assert refusal.value.names == ("b",), "a spare takes the place of who is the reason"
    assert "c-40/model.pt" not in job["b"].has()


def test_too_many_files_to_look_at_refuse_attempt(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that see the master's disk find what is left out there."""
    monkeypatch.setattr("orchestrator.node.transfer.job_files.MOST_FILES", 1)
    job = Job("ab", place)
    (job["a"].resume / "state.pt").write_text("of a")
    job["a"].write("runs/model.pt", "weights")
    with pytest.raises(CheckFailed, match=r"^a: .*20,000 new files.*older state") as refusal:
        job.again("ab")
    assert refusal.value.names == () and job["b"].has() == {}
    assert job.again("a") == []
    job.shared = True
    assert job.again("ab")[0].startswith("WARNING: a: too many files")
    assert (job["b"].resume / "state.pt").read_text() == "of a"


def test_silent_node_stops_attempt(place: Path) -> None:
    job = Job("ab", place)
    job["a"].write("\x1b[2Jckpt.pt", "step 40")

    def gone(request: Request[Any]) -> None:
        raise NodeError("it does not answer")

    job["b"].before = gone
    with pytest.raises(CheckFailed, match=r"ckpt\.pt, which a has, did not come to b") as refusal:
        job.again("ab")
    assert "\x1b" not in str(refusal.value) and refusal.value.names == ("b",)


def test_master_lost_during_copy_is_named(place: Path) -> None:
    job = Job("ab", place)
    job["a"].write("model.pt", "weights")

    def breaks(request: Request[Any]) -> None:
        if isinstance(request, ReadFile):
            raise NodeError("the connection broke")

    job["a"].before = breaks
    with pytest.raises(CheckFailed, match=r"did not come to a \(the connection broke\)") as refusal:
        job.again("ab")
    assert refusal.value.names == ("a",) and job["b"].has() == {}


def test_stop_by_user_ends_copy(place: Path) -> None:
    job = Job("ab", place)
    job["a"].write("ckpt.pt", "step 40")

    def stopped() -> None:
        if "contents" in job["b"].asked:  # it has begun to come
            raise StoppedEarly("stopped by the user")

    with pytest.raises(StoppedEarly):
        job.again("ab", stopped)


def test_file_in_many_pieces_is_identical(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_files, "PIECE_BYTES", 7)
    monkeypatch.setattr("orchestrator.head.transfer.send.BATCH_BYTES", 20)
    job = Job("abc", place)
    job["a"].write("empty.pt", "")
    job["a"].write("large.pt", "0123456789" * 10)
    assert "large.pt and 1 more (100 B)" in job.again("abc")[0]
    assert job["b"].has() == job["c"].has() == job["a"].has()


def test_copied_files_are_not_fetched_from_other_nodes(place: Path) -> None:
    job = Job("ab", place)
    place_of = [Path(one.part.experiment, "outputs") for one in job.machines.values()]
    (place_of[0] / "best.pt").write_text("best")
    (place_of[0] / "rank_00_metrics.jsonl").write_text("comes home otherwise")
    job.again("ab")
    assert (place_of[1] / "best.pt").read_text() == "best"
    assert not (place_of[1] / "rank_00_metrics.jsonl").exists()
    assert outputs.outputs_of_job(job["b"].part, OWN).files == ()
    (place_of[1] / "best.pt").write_text("written again")
    assert [file.path for file in outputs.outputs_of_job(job["b"].part, OWN).files] == ["best.pt"]


@pytest.mark.parametrize(
    "lie",
    [
        *({"path": path} for path in ("../b.pt", "/etc/b.pt", "a/../../b.pt")),
        *({"kind": "link", "target": target} for target in ("/etc/passwd", "../b.pt")),
        {"place": "another"},
    ],
)
def test_listed_paths_outside_are_ignored(place: Path, lie: dict[str, str]) -> None:
    job = Job("ab", place)
    job["a"].write("b.pt", "x")
    own = job["a"].ask

    def lies(request: Request[Any], seconds: float) -> Any:
        answer = own(request, seconds)
        return answer.replace(files=tuple(file.replace(**lie) for file in answer.files))

    cast("Any", job["a"]).ask = lies
    assert job.again("ab") == [] and job["b"].has() == {}


def test_metrics_follow_rank_to_other_node(place: Path) -> None:
    """Else its curve would begin at the step from which it goes on."""
    job = Job("abc", place)
    here = place / "here"
    here.mkdir()
    for rank in range(2):
        (here / f"rank_{rank:02d}_metrics.jsonl").write_text(f"rank {rank}")
    there = [Path(one.part.experiment, "outputs") for one in job.machines.values()]
    (there[0] / "rank_00_metrics.jsonl").write_text("rank 0, and lines that have not come home")
    nodes = [replace(NODE, name=name, first_rank=rank) for rank, name in enumerate("ac")]
    bring_metrics(here, ["a", "b"], nodes, [job.peer("a"), job.peer("c")])
    assert [path.name for path in there[2].iterdir()] == ["rank_01_metrics.jsonl"]
    assert "not come home" in (there[0] / "rank_00_metrics.jsonl").read_text()
    assert outputs.outputs_of_job(job["c"].part, OWN).files == ()
    shutil.rmtree(job["c"].part.home)
    with pytest.raises(CheckFailed, match="which this machine has, did not come to c"):
        bring_metrics(here, ["a", "b"], nodes, [job.peer("a"), job.peer("c")])
