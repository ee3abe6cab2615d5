"""How a further attempt is started, and what is written down of it."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.common.errors import CheckFailed, NodeError
from orchestrator.head.connect.channel import Declined
from orchestrator.head.follow.conclusion import after_attempt
from orchestrator.head.follow.streams.node_logs import NodeLogs
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen import events
from orchestrator.head.screen.events import Listener
from orchestrator.head.screen.log_reader import LogFile, LogReader
from orchestrator.head.start import launch
from orchestrator.head.start.gather import Gathered
from orchestrator.head.start.parts import first_placement, placements_of_attempt
from orchestrator.head.start.record import failed_record, not_started, with_line
from orchestrator.protocol.requests.request import Nothing
from orchestrator.protocol.requests.start import (
    Start,
    StartedHere,
    TakenPorts,
    TakePorts,
)
from orchestrator.records import experiments
from orchestrator.records.experiment import NOT_STARTED, Experiment, JobRecord, NodeRecord
from tests.head.heard import hearing
from tests.head.plan.probed import facts
from tests.head.start.test_gather import Asking, gathering, record
from tests.records.one_node import NODE


@pytest.fixture(autouse=True)
def unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "listeners", [Listener()])


@pytest.fixture
def place(tmp_path: Path) -> Experiment:
    return experiments.create_experiment(tmp_path / "experiments", "run")


def after(place: Experiment, job: JobRecord, gathered: Gathered, error: NodeError) -> JobRecord:
    """Return the job after an attempt that could not be started on these nodes."""
    failed = failed_record(job, gathered.nodes, gathered.spares, error)
    return after_attempt(place, failed)


def test_returned_node_that_cannot_start_is_replaced(tmp_path: Path) -> None:
    job = record("ab", lost="b", spares="s")
    gathered = gathering(tmp_path, job, silent="s")[0].run()
    assert [one.name for one in gathered.nodes] == ["a", "b"]
    place = experiments.create_experiment(tmp_path / "experiments", "other")
    final = after(place, job, gathered, NodeError("b: its disk is full", names=["b"]))
    assert [one.name for one in gathering(tmp_path, final)[0].run().nodes] == ["a", "s"]


class Unwilling(Asking):
    """Nodes that are there, and then are not."""

    def run(self) -> Gathered:
        raise NodeError("it does not answer")


def test_relaunch_keeps_signature_of_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise stop, attach and fetch would need --trust-record."""
    monkeypatch.setattr(launch, "Gathering", Unwilling)
    job = record("ac", lost="c", spares="b")
    place = experiments.create_experiment(tmp_path / "experiments", "other")
    place.write_signed(job)
    assert place.is_launched_here(place.read_record())
    with hearing() as said:
        final = launch.launch_again(place, job, cast(Any, None), {})
    assert isinstance(final, JobRecord) and final.over and len(final.attempts) == 3
    assert place.is_launched_here(place.read_record()), said


@pytest.mark.parametrize(("rank_env", "told"), [("", ()), ("slurm", ("a", "c"))])
def test_rank_env_decides_whether_hosts_are_listed(rank_env: str, told: tuple[str, ...]) -> None:
    job = record("ac")
    job = replace(
        job,
        launch=replace(job.launch, rank_env=rank_env),
        nodes=[replace(node, address=node.name) for node in job.nodes],
    )
    found = placements_of_attempt(
        job, first_placement(job, "a", TakenPorts(port=29500, peers_port=1)), 2
    )
    assert [place.hosts for place in found] == [told, told]


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ([(True, "")] * 3, ["warm start on all nodes"]),
        ([(False, "")] * 3, []),
        (
            [(True, ""), (False, "cold start: LANG differs"), (False, "cold start: LANG differs")],
            ["warm start on n0", "n1, n2: cold start: LANG differs"],
        ),
    ],
)
def test_tell_how_warm_reports_start_once(starts: list[tuple[bool, str]], said: list[str]) -> None:
    nodes = [NodeRecord(n, f"n{n}", "n", None, None, "", "", n, 1) for n in range(3)]
    started = [
        StartedHere(supervisor=1, shared=False, warm=warm, why_cold=why) for warm, why in starts
    ]
    with hearing() as heard:
        launch.tell_how_warm(nodes, started)
    assert heard == said


def test_with_line_appends_marker_between_attempts(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    place = Experiment(tmp_path)
    logs = NodeLogs.of(place, NODE)
    logs.text.append(memoryview(b"one\nhalf"))
    logs.ranks.append(memoryview(b"0 0\n"))
    node = with_line(place, NODE, "attempt 2")
    logs = NodeLogs.of(place, node)
    assert logs.text.size == logs.ranks.size == 0, "offsets start from the beginning"
    logs.text.append(memoryview(b"two\n"))
    logs.ranks.append(memoryview(f"{node.log_before} 1\n".encode()))
    assert logs.text.size == 4
    log = LogFile(0, "a", place.log(NODE), place.ranks(NODE))
    assert log.text.read_bytes() == b"one\nhalf\norchestrator: attempt 2\ntwo\n"
    pieces = [(piece.stream, piece.data) for piece in LogReader(log).read()]
    assert pieces == [
        ("0", b"one\nhalf"),
        ("-", b"\norchestrator: attempt 2\n"),
        ("1", b"two\n"),
    ]
    assert LogReader(log, start=node.log_before).read() == [("1", b"two\n")]


@pytest.mark.parametrize(
    ("started", "ended", "state"),
    [
        (NodeError("silent"), NodeError("silent"), "lost"),
        # The node has ended its processes or has none.
        (NodeError("silent"), Nothing(), NOT_STARTED),
        (Declined("full"), NodeError("silent"), NOT_STARTED),
        (StartedHere(supervisor=1, shared=True), NodeError("silent"), "lost"),
        (StartedHere(supervisor=1, shared=True), Nothing(), NOT_STARTED),
    ],
)
def test_node_silent_at_end_may_have_started(started: Any, ended: Any, state: str) -> None:

    class Channel:
        def ask(self, request: Any, timeout: float) -> Any:
            answer = started if isinstance(request, Start) else ended
            if isinstance(answer, Exception):
                raise answer
            return answer

    class Failing(Channel):
        def ask(self, request: Any, timeout: float) -> Any:
            raise Declined("no room")

    job = record("ab")
    channels: Any = [Failing(), Channel()]
    with pytest.raises(launch.NotStarted) as raised:
        launch.start_all(job, channels, [Start(), Start()])
    failed = not_started(replace(job, nodes=raised.value.nodes), raised.value)
    assert [node.state for node in failed.nodes] == [NOT_STARTED, state]


@pytest.mark.parametrize(("waits", "patience"), [(10.0, 30.0), (120.0, 120.0)])
def test_connect_timeout_extends_start(waits: float, patience: float) -> None:
    asked: list[float] = []

    class Channel:
        def ask(self, request: Any, timeout: float) -> Any:
            asked.append(timeout)
            return StartedHere(supervisor=1, shared=True)

    job = record("ab")
    job = replace(job, launch=replace(job.launch, connect_timeout=waits))
    channels: Any = [Channel(), Channel()]
    launch.start_all(job, channels, [Start(), Start()])
    assert asked == [patience] * 2


def test_stop_asks_node_that_may_have_started_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Channel:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, request: Any, timeout: float) -> Any:
            if self.name == "b":
                raise NodeError("silent")
            if isinstance(request, Start):
                return StartedHere(supervisor=1, shared=True)
            return (
                TakenPorts(port=29500, peers_port=1)
                if isinstance(request, TakePorts)
                else Nothing()
            )

    class Ready(Asking):
        def run(self) -> Gathered:
            nodes = [replace(node, state="starting") for node in record("ab").nodes]
            return Gathered(nodes, [cast("Any", Channel(node.name)) for node in nodes])

    monkeypatch.setattr(launch, "Gathering", Ready)
    monkeypatch.setattr(launch, "bring_saved", lambda *_: None)
    place = experiments.create_experiment(tmp_path / "experiments", "other")
    place.logs.mkdir(exist_ok=True)
    job = record("ab", lost="b")
    final = launch.launch_again(place, job, cast(Any, None), {})
    assert isinstance(final, JobRecord) and final.over
    assert [node.state for node in final.nodes] == [NOT_STARTED, "lost"]


MINE = "{}.{}".format(*sys.version_info[:2])


def nodes(*versions: str) -> list[ProbedNode]:
    return [
        ProbedNode(Node(f"n{i}"), facts(python_version=version), "")
        for i, version in enumerate(versions)
    ]


def test_check_python_names_other_minor_version() -> None:
    launch.check_python(nodes(f"{MINE}.0", f"{MINE}.99"))
    with pytest.raises(CheckFailed, match=rf"is {MINE} here:\n    n1 \(3\.1\.7, /usr") as raised:
        launch.check_python(nodes(f"{MINE}.0", "3.1.7", f"{MINE}.1"))
    assert f"a Python {MINE} that has torch" in raised.value.fix
