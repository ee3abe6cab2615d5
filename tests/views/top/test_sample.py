"""A sample of the live view: rates between two readings, progress of jobs, slow ranks."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.config.launch import Where
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.transport import Connection, Transport
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.requests.claims import ClaimEntry
from orchestrator.protocol.requests.machine import Examine
from orchestrator.protocol.requests.start import LockTableState, ReadLockTable
from orchestrator.records.experiment import Attempt
from orchestrator.records.metrics import progress, trainers
from orchestrator.views.top import sample as sampled
from orchestrator.views.top.sample import NodeSample, Watch
from tests.views.report.reports import experiment, line, train_again
from tests.views.top.samples import gpu, load, rank

CLAIM = ClaimEntry(id="a", state="running", job="train", since=1.0, keys=("gpu-0", "slot-1"))


class NoTransport(Transport):
    def __init__(self) -> None: ...


def test_rates_need_two_looks() -> None:
    before = load()
    # The counter of sent bytes was reset.
    now = before.replace(received=3000, sent=1000, at=12.0)
    assert sampled.rates_between(before, now) == (1000.0, 0.0)
    assert sampled.rates_between(None, now) == sampled.rates_between(now, now) == (None, None)


def test_slowest_rank_is_named_one_still_behind() -> None:
    even = [replace(rank(number), step_ms=100.0, own_ms=51.0) for number in range(4)]
    even[2] = replace(even[2], own_ms=91.0)
    assert progress.slowest_rank(progress.compare_ranks(even)) == "", (
        "a busy machine is no straggler"
    )
    named = [replace(each, cause="slow compute" if each.rank == 2 else "") for each in even]
    assert progress.slowest_rank(progress.compare_ranks(named)) == "rank 2 +40%"
    again = [replace(each, own_ms=51.0) for each in named]
    assert progress.slowest_rank(progress.compare_ranks(again)) == "", (
        "it is as quick as the others again"
    )
    unknown = [replace(each, own_ms=None, step_ms=None) for each in named]
    assert progress.slowest_rank(progress.compare_ranks(unknown)) == "rank 2"
    assert progress.slowest_rank([]) == ""


def test_slow_rank_of_earlier_attempt_is_not_named(tmp_path: Path) -> None:
    record = experiment(tmp_path / "run", steps=30).read_record()
    assert progress.slow_causes(record) == {2: "slow input"}
    attempt = Attempt(1, 0.0, 1.0 + (record.slow[0].time or 0), "failed", 1, None, [])
    assert progress.slow_causes(replace(record, attempts=[attempt])) == {}


def test_progress_joins_rank_metrics_with_nodes(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=30)
    _, found = progress.read_progress(made.path, made.read_record())
    assert [(one.rank, one.node, one.step, one.slow) for one in found] == [
        (0, "alpha", 30, False),
        (1, "alpha", 30, False),
        (2, "beta", 30, True),
        (3, "beta", 30, False),
    ]


def test_newest_trainer_is_shown(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=30)
    train_again(made, steps=7)
    found, each = progress.read_progress(made.path, made.read_record())
    assert (found.step, found.steps, found.left) == (7, None, None)
    assert [one.step for one in each] == [7, 7, 7, 7]


def test_time_left_is_estimate_of_ranks(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=3)
    path = made.path / "outputs" / trainers.file_name(0)
    with path.open("a") as file:
        file.write(json.dumps({**line(0, 4, -1), "steps": 5, "left_s": 90.5}) + "\n")
    found, _ = progress.read_progress(made.path, made.read_record())
    assert (found.step, found.steps, found.left) == (4, 5, 90.5)
    for last in ({**line(0, 5, -1), "left_s": 0.2}, line(0, 5, -1)):
        with path.open("a") as file:
            file.write(json.dumps(last) + "\n")
        found, _ = progress.read_progress(made.path, made.read_record())
        assert (found.step, found.left) == (5, None)


class Refusing(Transport):
    """A transport that refuses all connections; one host blocks it until `over` is set."""

    def __init__(self) -> None:
        self.over = Event()
        self.asked: list[str] = []

    def connect(self, node: Login, timeout: float | None = None) -> Connection:
        self.asked.append(node.host)
        if node.host == "late":
            self.over.wait(60)
        raise NodeError(f"{node.host} refuses")


@pytest.fixture
def refusing() -> Iterator[Refusing]:
    transport = Refusing()
    yield transport
    transport.over.set()


def test_late_node_delays_no_other(refusing: Refusing, tmp_path: Path) -> None:
    where = Where(experiments=tmp_path)
    with closing(Watch(refusing, [Node("late"), Node("other")], where)) as watch:
        watch.patience = 0.5
        problems = [node.problem for node in watch.observe().nodes]
        assert problems == ["connecting ...", "other refuses"]
        watch.observe()
        assert refusing.asked.count("late") == 1, "it is asked once, until it has answered"
        refusing.over.set()
        watch.patience = None
        assert [node.problem for node in watch.observe().nodes] == ["late refuses", "other refuses"]


def test_old_answer_is_not_shown_as_current(refusing: Refusing) -> None:
    node = sampled.WatchedNode(Node("late"), refusing)
    node.last = NodeSample("late", Checkup(load=load()))
    node.channel = Asked()  # type: ignore[assignment]
    assert node.newest() is node.last
    node.done.clear()
    node.since = time.monotonic() - 2.0
    assert node.newest() is node.last
    node.since -= 2 * sampled.STALE_SECONDS
    assert node.newest() == NodeSample("late", problem="it has not answered for 12 s")


class Asked:
    """A channel that notes which parts a look asks for."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, ...]] = []

    def ask(self, question: Examine | ReadLockTable, _: float) -> Checkup | LockTableState:
        if isinstance(question, ReadLockTable):
            return LockTableState(entries=(CLAIM,))
        self.parts.append(question.parts)
        gpus = (gpu(0, 1), gpu(1, 1)) if "gpus" in question.parts else None
        return Checkup(gpus=gpus, load=load())


def test_gpus_are_asked_at_intervals(refusing: Refusing) -> None:
    node, channel = sampled.WatchedNode(Node("one"), refusing), Asked()
    for _ in range(3):
        found = node.ask(channel)  # type: ignore[arg-type]
        assert found.gpus is not None and len(found.gpus) == 2 and found.load is not None
    node.gpus_at -= sampled.GPU_SECONDS
    node.ask(channel)  # type: ignore[arg-type]
    assert channel.parts == [("gpus", "load"), ("load",), ("load",), ("gpus", "load")]
    assert node.claims == (CLAIM,)


def test_jobs_are_found_with_experiments(tmp_path: Path) -> None:
    made = experiment(tmp_path / "train_20260101_000000", steps=30, state="running", ended=None)
    known = {**line(0, 30, -1), "steps": 50, "left_s": 2.0}
    (made.path / "outputs/rank_00_metrics.jsonl").write_text(json.dumps(known) + "\n")
    watch = Watch(Transport.__new__(NoTransport), [], Where(experiments=tmp_path))
    nodes = [
        NodeSample("one", Checkup(load=load("train_20260101_000000"))),
        NodeSample("two", Checkup(load=load("foreign"))),
        NodeSample("three", Checkup(load=load("train_20260101_000000"))),
        NodeSample("gone", problem="it does not answer"),
    ]
    ours, foreign = watch.jobs(nodes)
    assert (ours.nodes, ours.step, ours.steps) == (("one", "three"), 30, 50)
    assert ours.left == pytest.approx(2.0) and ours.slowest == "rank 2 +29%"
    assert (foreign.job, foreign.experiment, foreign.step) == ("foreign", "", None)
    assert watch.jobs([]) == [] and not watch.known
    watch.sought_at = float("-inf")
    (made.path / "outputs/rank_00_metrics.jsonl").write_text(json.dumps({"step": 5}))
    assert watch.jobs(nodes)[0].step == 5
    watch.closer = "train_20260101_000000"
    assert len(watch.jobs(nodes)[0].ranks) == 4
    made.path.rename(tmp_path / "removed")
    assert watch.jobs(nodes)[0].experiment == ""
