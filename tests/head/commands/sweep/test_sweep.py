"""How a sweep is led: what is given out when, and what becomes of members that end in any way."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.commands.sweep import slot as slots
from orchestrator.head.commands.sweep import sweep as leading
from orchestrator.head.commands.sweep import table
from orchestrator.head.commands.sweep.slot import Slot
from orchestrator.head.commands.sweep.space import Member
from orchestrator.head.commands.sweep.sweep import Given, Listed, Sweep
from orchestrator.head.follow import verdict
from orchestrator.head.screen.output import Terminal
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

NODE = NodeRecord(0, "a", "a", None, None, "10.0.0.1", "py", 0, 1, "ended")


class Process:
    """A member's process that has ended, or that ends when it is told to."""

    def __init__(self, over: bool = True) -> None:
        self.over = over
        self.answers, writing = os.pipe()
        self.answers = os.fdopen(self.answers)
        os.close(writing)

    def gone(self) -> bool:
        return self.over

    def last_words(self) -> str:
        return "last words"


class World:
    """A sweep whose members are played: `plays` says what each process does in its slot."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.root, self.begun, self.most = root, list[int](), 0
        self.plays: dict[int, Any] = {}
        self.journal = journals.create(root, "s", {})
        self.sweep = self.new(count)
        monkeypatch.setattr(slots, "begin", self.begin)

    def new(self, count: int, **more: Any) -> Sweep:
        members = [Member(at, {"x": str(at)}) for at in range(count)]
        return Sweep(self.journal, Listed(members), self.arguments, metric="acc", **more)

    def arguments(self, member: Member) -> tuple[LaunchArguments, list[str]]:
        where = Where(experiments=self.root)
        return LaunchArguments(where=where, launch={"name": f"s-{member.number}"}), []

    def begin(self, slot: Slot, *_: Any, place: str | None = None) -> Any:
        self.begun.append(slot.number)
        self.most = max(self.most, len(self.sweep.given) + 1)
        slot.send(pid=2**22 + 1, host="elsewhere")
        self.plays.get(slot.number, self.done)(slot)
        return Process()

    def done(self, slot: Slot, state: str = "done", **more: Any) -> None:
        experiment = experiments.create(self.root, f"s-{slot.number}")
        experiment.log(NODE).write_text(f"acc={slot.number}\n")
        record = JobRecord("j", str(experiment.path), state, ["x"], [NODE], time.time(), ended=9e9)
        experiment.write_record(replace(record, **more))
        slot.send(place=str(experiment.path))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch, 4)


def test_all_are_given_out_once_and_no_more_than_jobs_at_once(world: World) -> None:
    world.sweep.jobs = 3
    assert world.sweep.run() == 0
    assert world.begun == [0, 1, 2, 3] and world.most == 3
    assert [end.value for end in world.sweep.ends.values()] == [0, 1, 2, 3]
    assert world.journal.slots() == []
    again = world.new(4)
    assert again.run() == 0 and world.begun == [0, 1, 2, 3] and again.ends == world.sweep.ends


def test_a_process_that_ends_without_a_word_is_begun_again_three_times(world: World) -> None:
    tries: list[int] = []

    def twice(slot: Slot) -> None:
        tries.append(1)
        if len(tries) == 3:
            world.done(slot)

    world.plays = {1: twice, 2: lambda slot: None}
    assert world.sweep.run() == 1
    assert [world.begun.count(number) for number in range(4)] == [1, 3, 3, 1]
    assert world.sweep.ends[2].problem == "last words"


def test_a_node_that_cannot_be_reached_costs_a_restart_and_a_wrong_command_none(
    world: World,
) -> None:
    world.sweep.restarts = 1
    world.plays = {
        1: lambda slot: slot.send(error="no node", code=4),
        2: lambda slot: slot.send(error="no script", code=3),
    }
    assert world.sweep.run() == 1
    assert [world.begun.count(number) for number in range(4)] == [1, 2, 1, 1]
    assert [world.sweep.ends[n].problem for n in (1, 2)] == ["no node", "no script"]


def test_a_sweep_of_which_nothing_can_start_ends_soon(world: World) -> None:
    world.sweep.jobs = 1
    world.plays = dict.fromkeys(range(4), lambda slot: slot.send(error="no", code=3))
    assert world.sweep.run() == 1
    assert world.begun == [0, 1, 2] and list(world.sweep.left) == [3]


def test_an_experiment_that_its_process_could_not_name_is_found(world: World) -> None:
    def nameless(slot: Slot) -> None:
        launch = replace(JobRecord("", "", "", [], [], 0).launch, tag=(world.journal.name,))
        with contextlib.suppress(AttributeError):
            world.done(slot, launch=launch)
        text = slot.path.read_text().splitlines()[:-1]
        slot.path.write_text("\n".join(text) + "\n")

    world.plays = {1: nameless}
    assert world.sweep.run() == 0 and world.begun.count(1) == 1


def test_the_time_limit_is_an_end_as_good_as_any_and_a_stop_is_none(world: World) -> None:
    over = verdict.stopped("its time limit of 5 min is over (--time-limit)", 1.0)
    world.plays = {
        1: lambda slot: world.done(slot, "stopped", verdict=over),
        2: lambda slot: world.done(slot, "stopped", verdict=verdict.stopped("by hand", 1.0)),
    }
    assert world.sweep.run() == 1
    assert [world.sweep.ends[n].state for n in range(4)] == ["done", "done", "stopped", "done"]


def test_ten_thousand_members_take_no_time_to_show_or_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, 10_000)
    known = {"words": "x", "state": "done", "experiment": "e"}
    ends = [json.dumps({**known, "member": n, "value": n}) + "\n" for n in range(9_990)]
    world.journal.file.write_text("".join(ends))
    began = time.process_time()
    assert world.sweep.run() == 0
    board = table.Board("acc", "most", live=False)
    text = board.text(world.sweep, Terminal(100))
    assert time.process_time() - began < 2.0
    lines = text.splitlines()
    assert "10000 done" in lines[0] and lines[2].split()[:2] == ["9999", "x=9999"]
    assert lines[7].strip() == "and the worst:" and lines[8].split()[0] == "0" and len(lines) == 9


def test_as_many_wait_as_run_between_two_and_what_the_supply_allows(world: World) -> None:
    def given(running: int, waiting: int) -> bool:
        places = [Path("x")] * running + [None] * waiting
        slot = world.journal.slot(0)
        world.sweep.given = {
            at: Given(Member(at), slot, place=place) for at, place in enumerate(places)
        }
        return world.sweep.has_room

    assert given(0, 1) and not given(0, 2)
    assert given(5, 4) and not given(5, 5)
    assert given(50, 7) and not given(50, 8)
    world.sweep.jobs = 3
    assert given(2, 0) and not given(2, 1)


def test_a_job_without_a_head_gets_one_and_one_that_somebody_follows_is_left_to_him(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "REST_SECONDS", 0.0)
    monkeypatch.setattr(leading, "LOOK_SECONDS", 0.01)
    holder: list[Experiment] = []

    def headless(slot: Slot) -> None:
        if "place" not in slot.read():
            world.done(slot, "running", ended=None)
            return
        place = Experiment(Path(slot.read()["place"]))
        if slot.number == 2:
            place.write_record(replace(place.read_record(), state="done", ended=9e9))

    def followed(slot: Slot) -> None:
        world.done(slot, "running", ended=None)
        holder.append(Experiment(Path(slot.read()["place"])))
        assert holder[0].lock() is None

    def show(sweep: Sweep, end: Any) -> None:
        looks.append(1)
        if holder and len(looks) > 20:
            record = replace(holder[0].read_record(), state="done", ended=9e9)
            holder[0].write_record(record)
            holder[0].unlock()

    looks: list[int] = []
    world.plays = {1: headless, 2: headless, 3: followed}
    world.sweep.show = show
    assert world.sweep.run() == 1
    assert [world.sweep.ends[n].state for n in range(4)] == ["done", "lost", "done", "done"]
    assert [world.begun.count(n) for n in range(4)] == [1, 11, 2, 1]


def test_each_ctrl_c_reaches_each_head_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pressed: list[int] = []
    processes = {0: Process(over=False), 1: Process(over=False)}
    monkeypatch.setattr(leading.os, "kill", lambda pid, _: pressed.append(pid))
    monkeypatch.setattr(slots, "begin", lambda slot, *_: processes[slot.number])

    def show(sweep: Sweep, _: Any) -> None:
        looks.append(1)
        if len(looks) in (3, 6):  # Ctrl-C, and again
            sweep.interrupted()
        if len(looks) == 2:
            for number in processes:
                sweep.given[number].slot.send(pid=number + 100, host=socket.gethostname())
        if len(looks) == 9:
            for number, process in processes.items():
                world.done(sweep.given[number].slot, "stopped")
                process.over = True

    looks: list[int] = []
    world.sweep.show = show
    assert world.sweep.run() == 130
    assert pressed == [100, 101, 100, 101]
    assert [end.state for end in world.sweep.ends.values()] == ["interrupted"] * 2
    assert list(world.sweep.left) == [2, 3]


def test_what_a_running_member_has_measured_last_is_in_the_table(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = {0: Process(over=False), 1: Process(over=False)}
    monkeypatch.setattr(slots, "begin", lambda slot, *_: running[slot.number])
    monkeypatch.setattr(leading, "MEASURE_SECONDS", 0.0)
    monkeypatch.setattr(leading, "PAUSES", 0)
    world.sweep.jobs = 2
    trainer = [{"rank": 0, "step": step, "acc": step / 100} for step in (10, 20)]
    shown: list[str] = []

    def show(sweep: Sweep, _: Any) -> None:
        if not shown:
            for number in running:
                world.done(sweep.given[number].slot, "running")
        if len(shown) == 1:
            outputs = Path(sweep.given[1].said["place"]) / "outputs"
            text = "".join(json.dumps(line) + "\n" for line in trainer)
            (outputs / "rank_00_metrics.jsonl").write_text(text)
        shown.append(table.Board("acc", "most", live=True).text(sweep, Terminal(200)))
        if len(shown) == 4:
            sweep.interrupted()
            for number, process in running.items():
                world.done(sweep.given[number].slot, "stopped")
                process.over = True

    world.sweep.show = show
    world.sweep.run()
    rows = [line.split("  ") for line in shown[3].splitlines()[2:4]]
    cells = [[cell.strip() for cell in row if cell.strip()][:4] for row in rows]
    assert cells == [["0", "x=0", "running", "0"], ["1", "x=1", "running", "0.2 at step 20"]]
