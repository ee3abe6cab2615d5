"""How a head takes the end of a job, and what it writes into the record."""

import shutil
import signal
import time

import pytest

from orchestrator.config.launch import Launch
from orchestrator.head.follow.job_end import Outcome
from orchestrator.head.follow.streams.updates import Happened, Lost, Over
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.events import Ended, Ending, GpuReport, RankState
from orchestrator.protocol.timing import HEARSAY_SECONDS
from orchestrator.records.experiment import NodeRecord
from tests.head.follow.conftest import Deaf, Follow


@pytest.mark.parametrize(("out_of_time", "written"), [(True, "running"), (False, "stopped")])
def test_batch_job_out_of_time_stays_open(out_of_time: bool, written: str, follow: Follow) -> None:
    """A head on another machine that follows the record leaves a finished job."""
    run = follow(batch=True)
    run.end.outcome, run.out_of_time = Outcome.STOPPED, out_of_time
    run.conclude()
    assert run.experiment.read_record().state == written
    assert (run.record.state, run.record.exit_code) == ("stopped", 130)
    assert run.stopped_in_time is out_of_time


@pytest.mark.parametrize(
    ("message", "number", "state"),
    [
        ("killed by signal 15 (SIGTERM)", signal.SIGTERM, "stopped"),
        ("killed by signal 11 (SIGSEGV)", signal.SIGTERM, "failed"),
        ("killed by signal 15 (SIGTERM)", signal.SIGINT, "failed"),
    ],
)
def test_interrupt_of_ranks_and_head_is_a_stop(
    message: str, number: int, state: str, follow: Follow
) -> None:
    """scancel sends SIGTERM to all of them, and a rank's end may be heard of first."""
    run = follow()
    run.job.failed(Failure(1, "n2", 1, 1001.0, "signal", message))
    run.inbox.put(number)
    run.await_signal()
    run.conclude()
    assert run.record.state == state


GONE = "NVRM: Xid (PCI:0000:4f:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off"


@pytest.mark.parametrize(
    ("kind", "message", "blamed"),
    [
        ("hang", "no progress for 600 s: all ranks are in all_reduce #7", True),
        ("exception", "DistBackendError: NCCL communicator was aborted on rank 0", True),
        ("exception", "ValueError: the loss is NaN", False),
    ],
)
def test_broken_gpu_explains_hang_and_lost_gpus(
    kind: str, message: str, blamed: bool, follow: Follow, said: list[str]
) -> None:
    run = follow(2)
    for _ in range(2):
        run.reports.handle(Happened(1, GpuReport(time=1000.0, line=GONE)))
    run.job.failed(Failure(0, "n0", 0, 1001.0, kind, message))
    for node in run.job.nodes:
        node.close()
    run.conclude()
    warnings = [line for line in said if "Xid 79 at 0000:4f:00: GPU has fallen off" in line]
    assert [line.count("node 1 (n1)") for line in warnings[:1]] == [1]
    verdict = run.record.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.node) == (("gpu_fault", 1) if blamed else (kind, 0))
    assert ("# before n1 in the node list" in verdict.fix) == blamed
    if blamed:
        assert verdict.message.endswith(f"rank 0 on node 0 (n0): {message}")


@pytest.mark.parametrize("full", [True, False])
def test_head_without_room_leaves_the_result_on_the_nodes(full: bool, follow: Follow) -> None:
    run = follow(2)
    run.job.disk_is_full = full
    run.signalled(signal.SIGTERM)
    run.check_patience()
    assert not run.end.left
    run.end.give_up_at = 0.0
    run.check_patience()
    assert run.end.left is full and [node.given_up for node in run.job.nodes] == [not full] * 2


def test_killed_ranks_are_named(follow: Follow, said: list[str]) -> None:
    run = follow(1)
    ranks = {number: RankState(state="ended", pid=50 + number) for number in (0, 1)}
    ended = Ended(time=1005.04, agent=0, why="", killed={}, left=(), ranks=ranks)
    run.end.outcome = Outcome.STOPPED
    run.job.nodes[0].grace, run.job.nodes[0].asked_at = 5.0, 1000.0
    run.reports.tell_what_was_killed(
        run.job.nodes[0], ended.replace(killed={51: "python", 8: "worker"})
    )
    run.reports.tell_what_was_killed(run.job.nodes[0], ended)
    # The job is not over, so Ctrl-C is pressed a second time.
    run.job.nodes[0].grace = 30.0
    run.reports.tell_what_was_killed(
        run.job.nodes[0], ended.replace(time=1001.23, killed={50: "python"})
    )
    assert said == [
        "node 0 (n0): killed rank 1: still there 5 s after it was asked",
        "node 0 (n0): killed rank 0: still there 1.2 s after it was asked",
    ]


def test_log_that_lost_output_is_named(follow: Follow, said: list[str]) -> None:
    run = follow(1)
    ended = Ended(time=1005.0, agent=0, why="", killed={}, left=(), ranks={})
    for event in (ended, ended.replace(lost=90_000_000)):
        run.reports.handle(Happened(0, event))
    (line,) = said
    assert line.startswith("node 0 (n0): the last 90 MB of output are in no log")


@pytest.mark.parametrize("failure_first", [True, False])
def test_loss_is_cause_in_either_order_of_reports(follow: Follow, *, failure_first: bool) -> None:
    """Node 2 ends its ranks as it hears nothing of node 0: node 1's rank misses them at once."""
    run = follow(3)
    broke = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:691"
    )
    failure = Failure(1, "n1", 1, 1010.1, "communication", broke)
    why = "no word between node 2 and node 0 for 10 s"
    ending = Ending(time=1010.0, why=why, grace=0.5, lost=2, silent=10.0)
    reports = [
        lambda: run.job.failed(failure),
        lambda: run.reports.handle(Happened(2, ending)),
    ]
    for report in reports if failure_first else reversed(reports):
        report()
    for node in run.job.nodes:
        node.over = True
    run.conclude()
    assert (run.record.state, run.record.exit_code) == ("lost", 4)
    assert run.record.verdict is not None
    assert (run.record.verdict.node, run.record.verdict.message) == (2, why)


@pytest.mark.parametrize(("agent", "blamed"), [(-9, 2), (1, 1)])
def test_killed_torchrun_is_cause_though_reported_last(
    follow: Follow, agent: int, blamed: int
) -> None:
    """It ends with any code where ranks of other nodes have failed; no failure kills it."""
    run = follow(3)
    broke = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:6"
    run.job.failed(Failure(1, "n1", 1, 1010.1, "communication", broke))
    ended = Ended(time=1011.0, agent=agent, why="", killed={}, left=(), ranks={})
    run.reports.handle(Happened(2, ended))
    for node in run.job.nodes:
        node.over = True
    run.conclude()
    assert run.record.verdict is not None and run.record.verdict.node == blamed


@pytest.mark.parametrize(("state", "kind"), [("starting", "start"), ("running", "supervisor")])
def test_part_that_never_began_is_not_a_killed_supervisor(
    follow: Follow, state: str, kind: str
) -> None:
    """The head that was starting it was killed, and another follows the job before it begins."""
    node = NodeRecord(0, "n0", "n0", None, None, "10.0.0.1", "py", 0, 1, state=state)
    run = follow(nodes=[node])
    run.reports.handle(Over(0))
    run.conclude()
    assert run.record.verdict is not None
    assert (run.record.verdict.kind, run.record.verdict.node) == (kind, 0)


def test_save_reports_why_record_cannot_be_written(follow: Follow, said: list[str]) -> None:
    run = follow()
    shutil.rmtree(run.experiment.path)
    run.job.save()
    run.job.save()
    assert said == [f"{run.experiment.path} cannot be written: No such file or directory"]


@pytest.mark.parametrize(
    ("away", "left", "outcome"),
    [
        # This machine is the one that is cut off.
        ((30.0, 30.0), False, Outcome.OPEN),
        # The head was cut off for too long; a later `attach` determines the outcome.
        ((3600.0, 3600.0), True, Outcome.OPEN),
        # Only that node is cut off.
        ((30.0, 0.0), False, Outcome.LOST),
    ],
)
def test_head_cut_off_from_all_nodes_leaves_job(
    follow: Follow, away: tuple[float, float], left: bool, outcome: Outcome
) -> None:
    run = follow(2, left_behind=True, launch=Launch(node_loss_timeout=10.0))
    for node, seconds in zip(run.job.nodes, away, strict=True):
        node.lost_since = time.monotonic() - seconds if seconds else 0.0
    run.check_patience()
    assert (run.end.left, run.end.outcome) == (left, outcome)


@pytest.mark.parametrize(
    ("silent", "over", "given_up"),
    [
        (8.0, True, True),  # it has said nothing for longer than the others waited for it
        # Its connection broke a moment ago.
        (0.0, True, False),
        # The job goes on, and the node may come back.
        (8.0, False, False),
    ],
)
def test_lost_node_is_given_up_after_its_silence(
    follow: Follow, silent: float, over: bool, given_up: bool
) -> None:
    run = follow(2, launch=Launch(node_loss_timeout=5))
    run.reports.handle(Lost(1, "no word", silent))
    if over:
        run.job.give_up_on(
            run.job.nodes[1].failure(0.0, "lost", "no word between node 1 and node 0")
        )
    run.check_patience()
    assert [node.given_up for node in run.job.nodes] == [False, given_up]


def test_open_channels_asks_ended_nodes_alone(follow: Follow) -> None:
    run = follow(2, launch=Launch(max_restarts=1))
    asked: list[int] = []

    class Giving(Deaf):
        def __init__(self, index: int) -> None:
            self.node = run.record.nodes[index]

        def give_channel(self) -> None:
            asked.append(self.node.index)

    run.job.followers = [Giving(0), Giving(1)]  # type: ignore[list-item]
    run.job.nodes[0].close()
    run.job.nodes[1].given_up = True
    run.open_channels()
    assert asked == [0]


def test_signal_to_cut_off_head_leaves_job(follow: Follow) -> None:
    run = follow(left_behind=True)
    run.signalled(signal.SIGTERM)
    assert run.end.left and run.end.open


@pytest.mark.parametrize(("hang_timeout", "dials"), [(600.0, True), (0.0, True), (4.0, False)])
def test_short_hang_timeout_disables_port_check(
    hang_timeout: float, dials: bool, follow: Follow
) -> None:
    launch = Launch(hang_timeout=hang_timeout)
    run = follow(master="10.0.0.1:29500", launch=launch)
    assert run.monitors.start.master == ("10.0.0.1:29500" if dials else "")


@pytest.mark.parametrize(
    ("rank", "kind", "message", "at_once"),
    [
        (1, "signal", "killed by signal 9 (SIGKILL)", True),
        (1, "out_of_memory", "killed by signal 9 (SIGKILL): the kernel's out-of-memory", True),
        (1, "signal", "killed by signal 6 (SIGABRT)", False),  # NCCL's watchdog, for another
        (1, "exception", "ValueError: no", False),
        (None, "torchrun", "torchrun ended with exit code -9 (SIGKILL)", False),
    ],
)
def test_killed_rank_is_concluded_without_wait(
    rank: int | None, kind: str, message: str, at_once: bool, follow: Follow
) -> None:
    run = follow()
    run.job.failed(Failure(1, "n2", rank, 1001.0, kind, message))
    assert run.end.order_is_due(time.monotonic()) is at_once
    assert run.end.order_is_due(time.monotonic() + HEARSAY_SECONDS)
