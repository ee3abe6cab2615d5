"""What only some nodes have of what a program saved comes to the others, attempt for attempt.

The nodes are real ones without the network between head and node: a session each, directories of
their own, and files that go over TCP.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from orchestrator.common.errors import CheckFailed, NodeError, StoppedEarly
from orchestrator.head.transfer.bring import saved
from orchestrator.head.transfer.bring.checkpoint import Partner
from orchestrator.head.transfer.bring.decide import Key
from orchestrator.head.transfer.bring.saved import SavedFiles, bring_saved, view
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.transfer.saved import place as place_of_copies
from orchestrator.node.transfer.saved.place import CopiesTarget
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import AskSaved, Give, Giving, Saved, SavedFile
from orchestrator.records import experiments
from orchestrator.records.experiment import Attempt, JobRecord
from tests.head.start.recovery.test_gather import record
from tests.head.transfer.bring.nodes import Channel
from tests.node.start.test_next_spec import FIRST

JOB = "run-1"  # as of record()


class Machine(Channel):
    """One node: its working directory, and the server that a head talks to."""

    def __init__(self, index: int, name: str, place: Path) -> None:
        super().__init__()
        self.index, self.name, self.work = index, name, place / name
        self.work.mkdir(parents=True)
        run = RunDir(JOB, index)
        run.create()
        (Path(run.path) / "experiment/outputs").mkdir(parents=True)
        env = {"ORCHESTRATOR_EXPERIMENT": str(Path(run.path) / "experiment")}
        run.write_spec(FIRST.replace(node=index, env=env, workdir=str(self.work)))
        os.utime(run.spec, (1000, 1000))

    def write(self, name: str, content: str, at: int) -> None:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, (at, at))
        os.utime(path.parent, (at, at))

    def link(self, name: str, target: str, at: int) -> None:
        (self.work / name).unlink(missing_ok=True)
        (self.work / name).symlink_to(target)
        os.utime(self.work / name, (at, at), follow_symlinks=False)

    def has(self) -> dict[str, str]:
        """Return what a program would see."""
        found = {}
        for path in sorted(self.work.rglob("*")):
            if not path.name.startswith(".orchestrator-") and not path.is_dir():
                found[str(path.relative_to(self.work))] = path.read_text()
        return found


class Job:
    """A job of some attempts, whose times are 1000, 2000, ... by every clock."""

    def __init__(self, names: str, place: Path) -> None:
        self.machines = {name: Machine(at, name, place) for at, name in enumerate(names)}
        self.attempts: list[Attempt] = []
        self.began(names)

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def began(self, names: str) -> None:
        number = len(self.attempts) + 1
        job = f"{JOB}.{number}" if number > 1 else JOB
        if number > 1:
            run = RunDir(job, 0)
            run.create()
            run.write_spec(FIRST)
            os.utime(run.spec, (1000 * number, 1000 * number))
        one = Attempt(number, job, 0.0, 1.0, "failed", 1, None, list(names))
        self.attempts.append(one)

    def record(self) -> JobRecord:
        first = record(self.attempts[-1].nodes and "".join(self.attempts[-1].nodes))
        return replace(first, attempts=self.attempts)

    def partner(self, name: str) -> Partner:
        one = self.machines[name]
        return Partner(name, cast("Any", one), job=(JOB, one.index))

    def again(
        self, names: str, stopped: Callable[[], None] = lambda: None, left: str = ""
    ) -> list[str]:
        """Gather these nodes, bring what they lack, begin the next attempt; return what is said.

        Others are there that it leaves.
        """
        said: list[str] = []
        own, others = ([self.partner(name) for name in some] for some in (names, left))
        SavedFiles(own, (), self.record(), said.append, stopped, others).bring()
        self.began(names)
        return said


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(saved, "RULES", replace(saved.RULES, pauses=(0.0,)))
    yield tmp_path


def test_what_rank_0_saves_is_on_all_nodes_at_each_attempt(place: Path) -> None:
    job = Job("abc", place)
    job["a"].write("ckpt.pt", "step 40", 1500)
    said = job.again("abc")
    assert len(said) == 1
    assert said[0].startswith("only a had ckpt.pt (7 B): b, c have it now, too,"), said
    assert all(one.has() == {"ckpt.pt": "step 40"} for one in job.machines.values())
    assert (job["b"].work / "ckpt.pt").stat().st_mtime == 1500, "a program may ask for the newest"
    job["a"].write("ckpt.pt", "step 80", 2500)
    assert "have it now" in job.again("abc")[0]
    assert all(one.has() == {"ckpt.pt": "step 80"} for one in job.machines.values())
    for one in job.machines.values():
        one.asked.clear()
    assert job.again("abc") == []
    assert {do for one in job.machines.values() for do in one.asked} == {"saved"}


def test_directories_of_steps_their_last_and_what_was_pruned(place: Path) -> None:
    job = Job("ab", place)
    for step in (100, 20):
        job["a"].write(f"runs/step-{step}/model.pt", f"{step}", 1000 + step)
        job["a"].write(f"runs/step-{step}/meta.json", "{}", 1000 + step)
    job["a"].link("runs/latest", "step-100", 1100)
    job.again("ab")
    assert job["b"].has() == job["a"].has()
    assert str((job["b"].work / "runs/latest").readlink()) == "step-100"
    times = [(job["b"].work / f"runs/step-{step}").stat().st_mtime for step in (20, 100)]
    assert times == [1020, 1100], "the newest directory there is the newest here"
    shutil.rmtree(job["a"].work / "runs/step-20")
    job["a"].write("runs/step-200/model.pt", "200", 2200)
    job["a"].link("runs/latest", "step-200", 2200)
    said = job.again("ab")
    assert "2 copies removed" in said[1]
    assert str((job["b"].work / "runs/latest").readlink()) == "step-200"
    assert not (job["b"].work / "runs/step-20").exists()
    assert job["b"].has() == job["a"].has()


def test_who_has_it_passes_it_on_and_one_that_cannot_is_done_without(place: Path) -> None:
    """Two take from the first, then each may give to two; what fails so comes from the first."""
    job = Job("abcdefg", place)
    job["a"].write("ckpt.pt", "step 40", 1500)

    def mislead(machine: Machine) -> None:
        own = machine.ask

        def ask(request: Request[Any], seconds: float) -> Any:
            answer = own(request, seconds)  # and nobody listens at the port that we name
            return answer.replace(port=1) if isinstance(answer, Giving) else answer

        cast("Any", machine).ask = ask

    for name in "bcd":
        mislead(job[name])
    (said,) = job.again("abcdefg")
    assert "b, c, d" in said and "WARNING" not in said
    assert all(one.has() == {"ckpt.pt": "step 40"} for one in job.machines.values())
    gave = [job[name].asked.count("give") for name in "abcdefg"]
    assert gave[0] == 1 and any(gave[1:]), "to all, in the end"


def test_what_a_node_wrote_itself_stays(place: Path) -> None:
    """Also what it changed of a copy, and what has the name of a file that rank 0 removed."""
    job = Job("ab", place)
    for name in ("one.pt", "two.pt"):
        job["a"].write(name, "of a", 1500)
    job["b"].write("one.pt", "of b", 1501)
    said = job.again("ab")
    assert job["b"].has() == {"one.pt": "of b", "two.pt": "of a"}
    assert any("a, b have each written another one.pt" in line for line in said), said
    job["b"].write("two.pt", "new of b", 2500)
    (job["a"].work / "two.pt").unlink()
    job.again("ab")
    assert job["b"].has() == {"one.pt": "of b", "two.pt": "new of b"}


def test_whatever_its_name_is_it_is_said_where_it_differs(place: Path) -> None:
    job = Job("ab", place)
    for name in ("model.keras", "state", "train.log"):
        job["a"].write(name, "of a", 1500)
        job["b"].write(name, "of b", 1501)
    (said,) = job.again("ab")
    assert "a, b have each written another train.log and 2 more" in said


def test_equal_files_of_several_nodes_are_no_matter(place: Path) -> None:
    job = Job("abc", place)
    job["a"].write("ckpt.pt", "step 40", 1500)
    job["b"].write("ckpt.pt", "step 40", 1501)
    (said,) = job.again("abc")
    assert said.startswith("only b had ckpt.pt") and "c has it now" in said
    assert job["c"].has() == {"ckpt.pt": "step 40"}


def test_a_job_that_shrinks_to_one_node_is_told_what_is_lost(place: Path) -> None:
    job = Job("ab", place)
    (said,) = job.again("b")
    assert said.startswith("WARNING: what the program saved on a, if anything, is not there")
    job["b"].write("ckpt.pt", "step 40", 2500)
    assert job.again("b") == []


def test_parts_of_all_ranks_are_on_all_nodes(place: Path) -> None:
    """Any rank may read them: torch.distributed.checkpoint does, and a job that shrinks."""
    job = Job("ab", place)
    for rank in range(4):
        owner = job["ab"[rank // 2]]
        owner.write(f"rank{rank}", f"{rank}", 1500)
        owner.write(f"dcp/__{rank}_0.distcp", f"{rank}", 1500)
    job["a"].write("dcp/.metadata", "what is where", 1500)
    (said,) = job.again("ab")
    assert "a, b each had a part of" in said
    assert job["a"].has() == job["b"].has() and len(job["a"].has()) == 9


def test_another_node_takes_the_place_of_one(place: Path) -> None:
    """A new one gets all; of a lost one the copies are left, and go on to others."""
    job = Job("abc", place)
    job.attempts[0] = replace(job.attempts[0], nodes=["a", "b"])
    job["a"].write("ckpt.pt", "step 40", 1500)
    job.again("ab")
    job["a"].write("ckpt.pt", "step 80", 2500)
    said = job.again("bc")  # a is lost, with step 80
    assert said[0].startswith("only b had ckpt.pt") and "c has it now" in said[0]
    assert said[1].startswith("a is not there"), said
    assert job["b"].has() == job["c"].has() == {"ckpt.pt": "step 40"}
    job["b"].write("ckpt.pt", "step 60", 3500)
    said = job.again("abc")  # a is back, with what rank 0 wrote there in an earlier attempt
    assert job["a"].has() == {"ckpt.pt": "step 60", ".ckpt.pt.1.before": "step 80"}
    assert job["c"].has() == {"ckpt.pt": "step 60"}
    assert ".ckpt.pt.1.before" in said[0]


def test_rank_0_goes_to_another_node_and_comes_back(place: Path) -> None:
    """All nodes are there all the time: each of the two has written the file in its turn."""
    job = Job("abc", place)
    job["a"].write("step-40", "40", 1500)
    job["a"].link("latest", "step-40", 1500)
    job["a"].write("ckpt.pt", "40", 1500)
    for first, step in (("b", 60), ("a", 80)):
        job.again("abc")
        at = 1000 * len(job.attempts) + 500
        job[first].write(f"step-{step}", f"{step}", at)
        job[first].link("latest", f"step-{step}", at)
        job[first].write("ckpt.pt", f"{step}", at)
    said = job.again("abc")
    assert not [line for line in said if "each written another" in line]
    for one in job.machines.values():
        assert (one.has()["latest"], one.has()["ckpt.pt"]) == ("80", "80")


@pytest.mark.parametrize("world", [1, 2])
def test_a_node_that_makes_way_gives_what_it_alone_has(place: Path, world: int) -> None:
    """Its disk is full, say: it is there, and what it saved in this attempt no other node has."""
    job = Job("abcd", place)
    job.began("ab"[:world])
    job["a"].write("ckpt.pt", "step 40", 2500)
    said = job.again("cd"[:world], left="a")
    assert said[0].startswith("only a had ckpt.pt (7 B): c"), said
    assert all(job[name].has() == {"ckpt.pt": "step 40"} for name in "cd"[:world])
    job["c"].write("ckpt.pt", "step 80", 3500)
    job.again("cb", left="a")
    assert job["a"].has() == {"ckpt.pt": "step 40"}, "it gets nothing"
    assert job["b"].has() == job["c"].has() == {"ckpt.pt": "step 80"}


def test_a_node_that_makes_way_without_its_disk_has_nothing(place: Path) -> None:
    """It answers, and no more than a lost one can it have something newer than the copies."""
    job = Job("abc", place)
    job.attempts[0] = replace(job.attempts[0], nodes=["a", "b"])
    job["a"].write("ckpt.pt", "step 40", 1500)
    job.again("ab")
    shutil.rmtree(RunDir(JOB, 0).path)
    said = job.again("bc", left="a")
    assert said[0].startswith("only b had ckpt.pt") and "c has it now" in said[0], said
    assert job["c"].has() == {"ckpt.pt": "step 40"}


def test_what_rank_0_removed_of_a_lost_nodes_does_not_come_back(place: Path) -> None:
    job = Job("abc", place)
    job["a"].write("s_20.pt", "20", 1500)
    job["a"].write("s_40.pt", "40", 1500)
    job.again("abc")
    job.again("bc")
    (job["b"].work / "s_20.pt").unlink()
    job.again("bc")
    assert job["b"].has() == {"s_40.pt": "40"}


def test_what_was_there_before_the_job_makes_room_and_is_kept(place: Path) -> None:
    """Such as what somebody copied to all nodes by hand, for this job to go on from."""
    job = Job("ab", place)
    for one in job.machines.values():
        one.write("ckpt.pt", "step 40", 900)
    assert job.again("ab") == []
    job["a"].write("ckpt.pt", "step 80", 2500)
    job.again("ab")
    assert job["b"].has() == {"ckpt.pt": "step 80", ".ckpt.pt.1.before": "step 40"}


def test_a_half_written_file_is_said(place: Path) -> None:
    """It comes to the others, as a disk that all share would show it."""
    job = Job("ab", place)
    job["a"].write("c-20/model.pt", "20", 1500)
    job["a"].write("c-40/model.pt", "PK\x03\x04half", 1500)
    job["a"].link("latest", "c-40", 1500)
    said = job.again("ab")
    assert job["b"].has() == job["a"].has()
    assert "c-40/model.pt on a lacks its end" in said[1]


def test_a_half_written_file_becomes_what_it_was_if_another_node_knows_that(place: Path) -> None:
    """With the others of its directory: a state of two files is of one step."""
    job = Job("abc", place)
    for name in ("ckpt.pt", "step.txt", "c/model.pt", "c/optimizer.pt"):
        job["a"].write(name, "20", 1500)
    job.again("abc")
    for name in ("ckpt.pt", "c/optimizer.pt"):
        job["a"].write(name, "PK\x03\x04half of 40", 2500)
    job["a"].write("c/model.pt", "40", 2500)
    job["a"].write("c/new.pt", "40", 2500)
    said = job.again("abc")
    assert "c/optimizer.pt on a lacks its end" in said[-1] and "ckpt.pt on a" in said[-2], said
    seen = {name: text for name, text in job["a"].has().items() if "before" not in name}
    assert seen == job["b"].has() == job["c"].has()
    assert {*seen.values()} == {"20", "40"} and seen["c/new.pt"] == "40" and len(seen) == 5
    assert job["a"].has()["c/.model.pt.1.before"] == "40"
    assert job.again("abc") == [], "nothing of it is removed as something that is no more"
    assert job["b"].has() == seen
    job["a"].write("ckpt.pt", "60", 4500)
    job.again("abc")
    assert job["b"].has() == {**seen, "ckpt.pt": "60"}


@pytest.mark.parametrize("why", ["no room", "too much", "changed"])
def test_what_cannot_be_brought_ends_the_attempt_and_nothing_of_it_is_there(
    place: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    job = Job("ab", place)
    job["a"].write("c-40/model.pt", "weights", 1500)
    job["a"].write("c-40/other.pt", "weights", 1500)
    if why == "no room":
        full = SimpleNamespace(f_bavail=1, f_frsize=512, f_files=0, f_favail=0)
        monkeypatch.setattr(CopiesTarget, "disk", lambda _: full)
    elif why == "too much":
        monkeypatch.setattr(saved, "MOST_BYTES", 10)
    else:
        changes = job["a"].ask

        def ask(request: Request[Any], seconds: float) -> Any:
            if isinstance(request, Give):
                job["a"].write("c-40/other.pt", "another", 1500)
            return changes(request, seconds)

        cast("Any", job["a"]).ask = ask
    with pytest.raises(CheckFailed, match="its ranks would start from the beginning") as refusal:
        job.again("ab")
    assert "begins with a dot" in refusal.value.fix
    named = {"no room": ("b",), "too much": (), "changed": ("b",)}
    assert refusal.value.names == named[why], "a spare takes the place of who is the reason"
    assert job["b"].has() == {} and not (job["b"].work / place_of_copies.WAITING).exists()


def refused(*_: object, **__: object) -> NoReturn:
    raise ConnectionRefusedError(111, "refused")


def test_what_has_no_way_from_node_to_node_comes_through_the_head(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, links and times too, and where each node has a part and others need both."""
    job = Job("abc", place)
    job["a"].write("runs/s-1/model.pt", "weights" * 200_000, 1500)
    job["a"].link("runs/latest", "s-1", 1500)
    job["b"].write("rank1.pt", "of b", 1600)
    monkeypatch.setattr("orchestrator.node.transfer.take.socket.create_connection", refused)
    said = job.again("abc")
    assert "cannot take files from" in said[0] and "come through this machine" in said[0], said
    assert said[-1].startswith("only a, b had runs/s-1/model.pt and 2 more")
    for name in "bc":
        assert job[name].has() == job["a"].has()
        assert str((job[name].work / "runs/latest").readlink()) == "s-1"
        assert (job[name].work / "runs/s-1").stat().st_mtime == 1500
    assert job.again("abc") == [], "what came so is known as copies, too"


def test_a_stop_by_the_user_ends_it_and_is_passed_on(place: Path) -> None:
    job = Job("ab", place)
    job["a"].write("ckpt.pt", "step 40", 1500)
    asked: list[None] = []

    def stopped() -> None:
        asked.append(None)
        if len(asked) > 1:  # it has begun to come
            raise StoppedEarly("stopped by the user")

    with pytest.raises(StoppedEarly):
        job.again("ab", stopped)
    assert job["b"].asked[-1] == "ask_taken"  # to end it: nothing was asked before
    assert "end_giving" in job["a"].asked


def test_a_line_that_broke_is_tried_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("ab", place)
    job["a"].write("ckpt.pt", "step 40", 1500)
    connect = socket.create_connection
    tries: list[object] = []

    def dial(*words: Any, **more: Any) -> socket.socket:
        tries.append(words)
        if len(tries) == 1:
            refused()
        return connect(*words, **more)

    monkeypatch.setattr("orchestrator.node.transfer.take.socket.create_connection", dial)
    (said,) = job.again("ab")
    assert "b has it now" in said and job["b"].has() == {"ckpt.pt": "step 40"}


def test_copies_do_not_come_home_at_the_end(place: Path) -> None:
    from orchestrator.node.transfer import outputs

    job = Job("ab", place)
    Path(RunDir(JOB, 0).path, "experiment/outputs/best.pt").write_text("best")
    job.again("ab")
    own = outputs.of_job(RunDir(JOB, 1), checkpoints=False)
    assert Path(RunDir(JOB, 1).path, "experiment/outputs/best.pt").read_text() == "best"
    assert [file.path for file in own.files] == []


def test_no_attempt_begins_beside_a_node_that_does_not_answer(place: Path) -> None:
    job = Job("ab", place)
    job["a"].write("\x1b[2Jckpt.pt", "step 40", 1500)

    def gone(request: Request[Any], _: float) -> Any:
        raise NodeError("it does not answer")

    cast("Any", job["b"]).ask = gone
    with pytest.raises(CheckFailed, match=r"b does not have .*ckpt\.pt, as a has it") as refusal:
        job.again("ab")
    assert "\x1b" not in str(refusal.value)


# -- a disk that all share ------------------------------------------------------------------------


def test_a_network_disk_that_lags_behind_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank that does not see a checkpoint would begin anew beside those that go on."""
    monkeypatch.setattr(saved, "POLL_SECONDS", 0.0)
    seen: list[Sequence[str]] = [("a_4.pt", "a_8.pt"), ("a_4.pt", "a_8.pt"), ("a_4.pt",), ()]
    stops: list[None] = []

    def seen_files(names: Sequence[str]) -> Saved:
        files = tuple(SavedFile(path=name, place="work") for name in names)
        return Saved(files=files, roots={"work": "/x"}, shared=True)

    def new(request: Request[Any], _: float) -> Saved:
        return seen_files(("a_4.pt", "a_8.pt"))

    def late(request: Request[Any], _: float) -> Saved:
        assert isinstance(request, AskSaved)
        return seen_files(seen.pop())

    said: list[str] = []
    partners = [
        Partner(name, cast("Any", SimpleNamespace(ask=ask)), job=(JOB, at))
        for at, (name, ask) in enumerate({"a": new, "b": late}.items())
    ]
    place = experiments.create(tmp_path / "experiments", "run")
    program = replace(record("ab"), engine=False)
    bring_saved(place, program, partners, (), said.append, lambda: stops.append(None))
    assert len(said) == 1 and said[0].startswith("not every node sees a_4.pt yet")
    assert len(seen) == 1 and len(stops) == 2, "it goes on as soon as all nodes see all"

    monkeypatch.setattr(saved, "LAG_SECONDS", 0.0)
    seen[:] = [()]
    with pytest.raises(CheckFailed, match=r"not every node sees a_4\.pt"):
        bring_saved(place, program, partners, (), said.append, lambda: None)


# -- what a node says -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "path", "known"),
    [
        ("work", "a/b.pt", True),
        ("work", "../b.pt", False),
        ("work", "/etc/b.pt", False),
        ("elsewhere", "b.pt", False),
    ],
)
def test_only_files_inside_a_place_are_known(place: str, path: str, *, known: bool) -> None:
    saved = Saved(files=(SavedFile(path=path, place=place),), roots={"work": "/work"})
    assert list(view("a", saved).files) == [Key(place, path)] * known
