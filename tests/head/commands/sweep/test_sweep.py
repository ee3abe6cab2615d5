"""How a sweep is led: which members are started when, and how those count that end in any way."""

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.background.process import INTERRUPT
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.commands.sweep import sweep as leading
from orchestrator.head.commands.sweep.journal import About, MemberState
from orchestrator.head.commands.sweep.space import Member
from orchestrator.head.commands.sweep.sweep import StartedMember, Sweep
from orchestrator.head.follow import verdict
from orchestrator.head.screen.output import Terminal
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

NODE = NodeRecord(0, "a", "a", None, None, "10.0.0.1", "py", 0, 1, "ended")
LAST_WORDS = OrchestratorError("last words")


class Process:
    """The background process of a member, which answers what a test plays."""

    def __init__(self, number: int) -> None:
        self.number, self.pressed = number, list[bytes]()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def answer(self, say: Callable[[str], None]) -> dict[str, Any]:
        answer = self.answers.get()
        if isinstance(answer, OrchestratorError):
            raise answer
        return dict(answer)

    def press(self, key: bytes) -> None:
        self.pressed.append(key)


class World:
    """A sweep whose members are played: `plays` says what each process does."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.root, self.begun, self.most = root, list[int](), 0
        self.plays: dict[int, Callable[[Process], None]] = {}
        self.processes: dict[int, Process] = {}
        self.journal = journals.create_journal(root, "s", About())
        members = [Member(at, {"x": str(at)}) for at in range(count)]
        self.sweep = Sweep(self.journal, members, self.arguments, metric="acc")
        monkeypatch.setattr(leading, "Background", self.begin)
        monkeypatch.setattr(leading, "LOOK_SECONDS", 0.01)

    def arguments(self, member: Member) -> tuple[LaunchArguments, list[str]]:
        where = Where(experiments=self.root)
        return LaunchArguments(where=where, launch={"name": f"s-{member.number}"}), []

    def begin(self, do: Any, **arguments: Any) -> Process:
        name = arguments["arguments"].launch["name"]
        number = int(Path(name).name.split("_")[0].removeprefix("s-"))
        self.begun.append(number)
        self.most = max(self.most, len(self.sweep.started) + 1)
        process = self.processes[number] = Process(number)
        self.plays.get(number, self.done)(process)
        return process

    def job(self, process: Process, state: str, **more: Any) -> Experiment:
        """Answer with the directory of the member's job, in this state."""
        experiment = experiments.create_experiment(self.root, f"s-{process.number}")
        experiment.log(NODE).write_text(f"acc={process.number}\n")
        record = JobRecord("j", str(experiment.path), state, ["x"], [NODE], time.time(), ended=9e9)
        experiment.write_record(replace(record, **more))
        process.answers.put({"place": str(experiment.path)})
        return experiment

    def done(self, process: Process, state: str = "done", **more: Any) -> None:
        self.job(process, state, **more)
        process.answers.put(LAST_WORDS)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch, 4)


def test_run_starts_each_member_once_within_jobs(world: World) -> None:
    world.sweep.jobs = 3
    assert world.sweep.run() == 0
    assert world.begun == [0, 1, 2, 3] and world.most == 3
    assert [end.value for _, end in sorted(world.sweep.ends.items())] == [0, 1, 2, 3]


def test_run_says_why_member_did_not_start(world: World) -> None:
    world.plays = {
        1: lambda process: process.answers.put(NodeError("no node")),
        3: lambda process: process.answers.put(LAST_WORDS),
    }
    assert world.sweep.run() == 1
    assert [world.sweep.ends[number].problem for number in (1, 3)] == ["no node", "last words"]


def test_run_ends_early_if_first_members_cannot_start(world: World) -> None:
    world.sweep.jobs = 1
    refuses: Callable[[Process], None] = lambda process: process.answers.put(CheckFailed("no"))  # noqa: E731
    world.plays = dict.fromkeys(range(4), refuses)
    assert world.sweep.run() == 1
    assert world.begun == [0, 1, 2] and list(world.sweep.left) == [3]


def test_run_counts_time_limit_as_done_but_not_stop_by_hand(world: World) -> None:
    over = verdict.stopped_verdict("its time limit of 5 min is over (--time-limit)", 1.0)
    world.plays = {
        1: lambda process: world.done(process, "stopped", verdict=over),
        2: lambda process: world.done(
            process, "stopped", verdict=verdict.stopped_verdict("by hand", 1.0)
        ),
    }
    assert world.sweep.run() == 1
    assert [world.sweep.ends[n].state for n in range(4)] == ["done", "done", "stopped", "done"]


def test_table_lists_best_members_first(world: World) -> None:
    world.sweep.ends = {
        number: MemberState(number, f"x={number}", "done", value=number, experiment="e")
        for number in range(10)
    }
    lines = leading.to_text(world.sweep, "most", Terminal(100)).splitlines()
    assert "10 done" in lines[0] and lines[2].split()[:2] == ["9", "x=9"]
    assert len(lines) == 2 + leading.BEST


def test_sweep_without_metric_compares_losses(world: World) -> None:
    def losing(process: Process) -> None:
        place = world.job(process, "done")
        place.log(NODE).write_text("".join(f"loss={5 - process.number}\n" for _ in "ab"))
        process.answers.put(LAST_WORDS)

    world.sweep.metric = leading.USUAL
    world.plays = dict.fromkeys((0, 1, 3), losing)
    assert world.sweep.run() == 0
    lines = leading.to_text(world.sweep, "least", Terminal(100)).splitlines()
    assert [line.split()[:4] for line in lines[2:]] == [
        [str(number), f"x={number}", "done", str(5 - number)] for number in (3, 1, 0)
    ]
    assert world.sweep.ends[2].problem == ""
    world.sweep.ends = {2: world.sweep.ends[2]}
    assert "x=2" in leading.to_text(world.sweep, "least", Terminal(100))


def test_has_room_limits_waiting_members_by_running_ones(world: World) -> None:
    def has_room(running: int, waiting: int) -> bool:
        places = [Path("x")] * running + [None] * waiting
        world.sweep.started = {
            at: StartedMember(Member(at), Process(at), place) for at, place in enumerate(places)
        }
        return world.sweep.has_room

    assert has_room(0, 1) and not has_room(0, 2)
    assert has_room(5, 4) and not has_room(5, 5)
    assert has_room(50, 7) and not has_room(50, 8)
    world.sweep.jobs = 3
    assert has_room(2, 0) and not has_room(2, 1)


def test_run_marks_job_without_head_as_lost_unless_followed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def headless(process: Process) -> None:
        world.job(process, "running", ended=None)
        process.answers.put(LAST_WORDS)

    def followed(process: Process) -> None:
        job = world.job(process, "running", ended=None)
        assert job.lock() is None
        process.answers.put(LAST_WORDS)
        threading.Timer(0.5, ends, [job]).start()

    def ends(job: Experiment) -> None:
        job.write_record(replace(job.read_record(), state="done", ended=9e9))
        job.unlock()

    monkeypatch.setattr(leading, "ALONE_SECONDS", 0.1)
    world.plays = {1: headless, 3: followed}
    assert world.sweep.run() == 1
    assert [world.sweep.ends[n].state for n in range(4)] == ["done", "lost", "done", "done"]


@pytest.mark.parametrize("by", ["Ctrl-C", "stop"])
def test_run_passes_interrupt_or_stop_to_each_member_once(world: World, by: str) -> None:
    world.plays = dict.fromkeys(range(4), lambda process: None)

    def play() -> None:
        while len(world.begun) < 2:
            time.sleep(0.01)
        world.journal.ask_to_stop() if by == "stop" else world.sweep.interrupted()
        while not world.processes[1].pressed:
            time.sleep(0.01)
        time.sleep(0.1)
        world.done(world.processes[0], "stopped")
        # It was still waiting in the queue.
        world.processes[1].answers.put(LAST_WORDS)

    threading.Thread(target=play, daemon=True).start()
    assert world.sweep.run() == 130
    assert [world.processes[n].pressed for n in (0, 1)] == [[INTERRUPT]] * 2
    assert [end.state for end in world.sweep.ends.values()] == ["interrupted"] * 2
    assert list(world.sweep.left) == [2, 3]


def test_stop_signals_no_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a head in another container may be that of any process here."""
    victim = subprocess.Popen(["sleep", "1000"])
    leader = Experiment(world.journal.path)
    assert leader.lock() is None
    told = {"host": os.uname().nodename, "pid": victim.pid, "since": 1.0}
    (world.journal.path / ".head").write_text(json.dumps(told))

    def leave(_: float) -> None:
        assert world.journal.stop_is_asked
        leader.unlock()

    monkeypatch.setattr("time.sleep", leave)
    try:
        assert leading.stop_sweep(Where(experiments=world.root), world.journal, None) == 0
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_run_survives_journal_on_full_disk(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(journals.files, "append_lines", full)
    assert world.sweep.run() == 0
    assert "cannot be written: the report lacks members" in capsys.readouterr().err
