"""Sweeps: many launches of one command, which are stopped, and whose head is killed."""

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.records.experiment import Experiment
from tests.launching import PATIENCE, Command, Head
from tests.node.running import wait_until

# Notes each start with its arguments, and ends when its file is there; fails where it is told to.
NOTES = """
import json, os, sys, time
notes = os.environ["NOTES"]
with open(os.path.join(notes, "starts"), "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ.get("INDEX")]) + "\\n")
print("acc=0." + sys.argv[1][-1:], flush=True)
while not os.path.exists(os.path.join(notes, "end")):
    time.sleep(0.01)
sys.exit(1 if "--fail=1" in sys.argv else 0)
"""
QUICK = ("--no-torchrun", "--check", "none", "--max-restarts", "0")


class Sweeps:
    """A user who sweeps over a program that records each member's start."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.notes = head.directory.parent / f"{head.directory.name}-notes"
        self.notes.mkdir(mode=0o777)
        head.script("notes.py", NOTES)
        self.running: list[Command] = []

    def sweep(self, *words: str) -> Command:
        options = (*QUICK, "--env", f"NOTES={self.notes}")
        self.running.append(self.head.command("orchestrator", "sweep", *options, *words))
        return self.running[-1]

    def end(self) -> None:
        (self.notes / "end").touch()

    def starts(self) -> Counter[str]:
        path = self.notes / "starts"
        return Counter(path.read_text().splitlines() if path.exists() else [])

    @property
    def directory(self) -> Path:
        (place,) = (self.head.directory / "experiments").glob("*/sweep.json")
        return place.parent

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "journal.jsonl").open()]

    def until(self, there: Callable[[], object]) -> None:
        wait_until(there, self.running[-1].text, PATIENCE)


@pytest.fixture
def sweeps(head: Head) -> Iterator[Sweeps]:
    sweeps = Sweeps(head)
    yield sweeps
    sweeps.end()
    for command in sweeps.running:
        if command.process.poll() is None:
            command.finish()


def test_values_reach_program_and_result_is_json(sweeps: Sweeps) -> None:
    sweeps.end()
    odd = json.dumps(["-1", "a b'\"$c,9"])
    options = ("--json", "--metric", "acc", "--set", "launch.note=odd", "--tag", "mine")
    what = ("--grid", f"x={odd}", "fail=0,1", "--", "notes.py", "{x}")
    shown = sweeps.sweep("--json", "--dry-run", *what).ends()
    assert [words[-2:] for words in json.loads(shown.text)][3] == ["a b'\"$c,9", "--fail=1"]
    done = sweeps.sweep(*options, *what).ends(1)
    text = done.text[done.text.index("{") :]
    found = json.JSONDecoder().raw_decode(text)[0]
    assert [(one["values"], one["state"]) for one in found["members"]] == [
        ({"x": "-1", "fail": "0"}, "done"),
        ({"x": "-1", "fail": "1"}, "failed"),
        ({"x": "a b'\"$c,9", "fail": "0"}, "done"),
        ({"x": "a b'\"$c,9", "fail": "1"}, "failed"),
    ]
    assert found["best"]["member"] == 2 and found["best"]["value"] == 0.9
    record = Experiment(sweeps.head.directory / "experiments" / found["best"]["experiment"])
    launch = record.read_record().launch
    assert (launch.tag, launch.note) == (("mine", found["sweep"]), "odd")
    assert sorted(json.loads(line)[0] for line in sweeps.starts()) == [
        ["-1", "--fail=0"],
        ["-1", "--fail=1"],
        ["a b'\"$c,9", "--fail=0"],
        ["a b'\"$c,9", "--fail=1"],
    ]
    sweeps.head.command("orchestrator", "rerun", found["best"]["experiment"]).ends()
    assert sweeps.starts()['[["a b\'\\"$c,9", "--fail=0"], null]'] == 2


def test_members_survive_killed_head_and_stop_ends_them(sweeps: Sweeps) -> None:
    first = sweeps.sweep("--as", "env", "--grid", "INDEX=0..5", "--", "notes.py", "x")
    sweeps.until(lambda: len(sweeps.starts()) == 2)
    # Two more wait in the queue.
    sweeps.until(lambda: len(sweeps.journal()) == 4)
    first.interrupt(signal.SIGKILL)
    first.finish()
    stopped = sweeps.head.command("orchestrator", "stop", sweeps.directory.name).ends()
    assert stopped.text.count("ended") >= 2, stopped.text
    assert sum(sweeps.starts().values()) == 2
    assert sweeps.head.nothing_left()


def test_ctrl_c_ends_all_members(sweeps: Sweeps) -> None:
    first = sweeps.sweep("--grid", "x=0..4", "notes.py")
    sweeps.until(lambda: len(sweeps.starts()) == 2)
    first.interrupt()
    assert first.finish() == 130, first.text
    assert sweeps.head.nothing_left()
    assert {event.get("state") for event in sweeps.journal()} == {"not over", "interrupted"}


def test_sweep_refuses_detach(sweeps: Sweeps) -> None:
    refused = sweeps.sweep("--detach", "--grid", "x=0", "--", "notes.py").ends(2)
    assert "tmux or nohup keep a sweep" in refused.text
