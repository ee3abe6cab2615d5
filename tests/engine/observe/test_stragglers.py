"""Each cause is named by its own name and once, and a busy machine is no cause."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from orchestrator import Trainer
from orchestrator.engine.observe import cores
from orchestrator.engine.observe.stragglers import STEPS_AT_ONCE, Detector, Part, Slow, Step
from orchestrator.protocol.events import RankSlow, from_report
from orchestrator.protocol.message import parse
from orchestrator.records.metrics import slow_ranks
from tests.engine.worlds import Job, run

WORLD = 4
NODES = [0, 0, 1, 1]
Measured = Callable[[int, int], Step]  # of a step, on a rank


def fine(step: int, rank: int) -> Step:
    return Step(0.5, 0.3, 0.01, 0.15)


def heard(
    steps: int, measured: Measured, beside: Callable[[int, int], dict[str, float]] | None = None
) -> Iterator[tuple[int, Slow]]:
    """What is found, and the step after which it is."""
    detector = Detector(0, NODES)
    for end in range(STEPS_AT_ONCE, steps + 1, STEPS_AT_ONCE):
        own = range(end - STEPS_AT_ONCE + 1, end + 1)
        parts = [
            Part(
                tuple(measured(step, rank) for step in own),
                **(beside(end, rank) if beside else {}),
            )
            for rank in range(WORLD)
        ]
        yield from ((end, slow) for slow in detector.hear(parts))


BEGINS = 42  # in the middle of a message


def throttled(step: int, rank: int) -> Step:
    """Rank 2 computes at 70%: the others wait for it."""
    if step <= BEGINS:
        return fine(step, rank)
    return Step(0.63, 0.43, 0.01, 0.15) if rank == 2 else Step(0.63, 0.3, 0.01, 0.28)


def stalling(step: int, rank: int) -> Step:
    """Rank 1's loader stalls for a second in every third step."""
    if step <= BEGINS or step % 3:
        return fine(step, rank)
    return Step(1.5, 0.3, 1.01, 0.15) if rank == 1 else Step(1.5, 0.3, 0.01, 1.15)


def lossy(step: int, rank: int) -> Step:
    return fine(step, rank) if step <= BEGINS else Step(1.0, 0.3, 0.01, 0.65)


def resends(step: int, rank: int) -> dict[str, float]:
    """Node 1 sends a tenth again; of node 0 a few are lost, as anywhere."""
    bad = step > BEGINS and NODES[rank] == 1
    return {"sent": 2000.0, "resent": 200.0 if bad else 1.0}


def writes(step: int, rank: int) -> dict[str, float]:
    """A checkpoint in every message; rank 3's disk needs 4 seconds for its part."""
    bad = step > BEGINS and rank == 3
    return {"writes": step / STEPS_AT_ONCE, "write_seconds": 4.0 if bad else 0.2}


@pytest.mark.parametrize(
    ("measured", "beside", "cause", "rank", "words"),
    [
        (throttled, None, slow_ranks.COMPUTE, 2, "computes 1.43 times as long as the others"),
        (stalling, None, slow_ranks.DATA, 1, "waits for its data"),
        (lossy, resends, slow_ranks.LINK, 2, "of its packets again, and communication takes"),
        (fine, writes, slow_ranks.DISK, 3, "in 4.0 s, the others in 0.2 s"),
    ],
)
def test_each_cause_is_named_within_twenty_steps_and_once(
    measured: Measured,
    beside: Callable[[int, int], dict[str, float]] | None,
    cause: str,
    rank: int,
    words: str,
) -> None:
    ((step, slow),) = heard(400, measured, beside)
    assert (slow.cause, slow.rank) == (cause, rank)
    assert words in slow.text
    assert step <= BEGINS + 20
    assert slow.last <= step


def test_quick_steps_are_judged_over_five_seconds() -> None:
    def quick(step: int, rank: int) -> Step:
        slow = throttled(step, rank)
        return Step(*(value / 10 for value in slow))

    ((step, _),) = heard(400, quick)
    assert (step - BEGINS) * 0.05 >= 4.0


def test_where_waits_are_not_seen_nobody_is_blamed_for_computing() -> None:
    def unseen(step: int, rank: int) -> Step:
        return throttled(step, rank)._replace(compute=math.nan)

    assert list(heard(400, unseen)) == []


def test_lost_packets_that_hold_nobody_up_are_not_told() -> None:
    assert list(heard(400, fine, lambda step, rank: {"sent": 100.0, "resent": 0.0})) == []

    def hidden(step: int, rank: int) -> Step:
        return Step(0.5, 0.4, 0.01, 0.05)

    assert list(heard(400, hidden, resends)) == []


def test_two_causes_are_two_lines() -> None:
    found = [slow.cause for _, slow in heard(400, throttled, writes)]
    assert sorted(found) == sorted([slow_ranks.COMPUTE, slow_ranks.DISK])


@pytest.mark.parametrize("seed", range(4))
def test_an_hour_of_a_busy_machine_alarms_nobody(seed: int) -> None:
    """Steps of half a second, of which each rank's own times vary by a third; other programs come
    and double them, for up to some seconds; loaders hiccup; every rank waits for the slowest."""
    own = random.Random(seed)
    busy = [0] * WORLD  # steps for which another program goes on there

    def hour() -> Iterator[list[Step]]:
        for _ in range(7200):
            works = []
            for rank in range(WORLD):
                busy[rank] = max(0, busy[rank] - 1) or (
                    own.randint(1, 8) if own.random() < 0.02 else 0
                )
                compute = 0.3 * math.exp(own.gauss(0, 0.3)) * (2 if busy[rank] else 1)
                data = 0.005 + (own.random() < 0.01) * own.random() * 2
                works.append((compute, data))
            whole = max(map(sum, works)) + 0.05
            yield [Step(whole, c, d, whole - c - d) for c, d in works]

    steps = list(hour())
    found = heard(7200, lambda step, rank: steps[step - 1][rank])
    assert [slow.text for _, slow in found] == []


# -- an overfull machine ---------------------------------------------------------------------------

WORK = 0.3  # seconds of a step, on a core of its own


def crowded(denied: Callable[[int], float], *, work: Callable[[int], float]) -> Measured:
    """What ranks measure that wait so long for a core in each step, besides their work."""

    def measured(step: int, rank: int) -> Step:
        compute = [work(each) + denied(each) for each in range(WORLD)]
        whole = max(compute) + 0.05
        return Step(whole, compute[rank], 0.01, whole - compute[rank])

    return measured


def reported(denied: Callable[[int], float]) -> Callable[[int, int], dict[str, float]]:
    return lambda _, rank: {"denied": denied(rank) * STEPS_AT_ONCE}


def test_a_rank_that_its_machine_gives_no_core_is_not_slow() -> None:
    starved: Callable[[int], float] = {0: 4.0, 1: 0.2, 2: 0.1, 3: 0.2}.__getitem__
    measured = crowded(starved, work=lambda _: WORK)
    assert [slow.rank for _, slow in heard(200, measured)] == [0], "as its times alone say"
    assert list(heard(200, measured, reported(starved))) == []


def test_a_rank_that_is_slow_on_an_overfull_machine_is_named() -> None:
    twice: Callable[[int], float] = {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0}.__getitem__
    measured = crowded(twice, work=lambda rank: WORK * twice(rank))
    ((_, slow),) = heard(200, measured, reported(twice))
    assert (slow.cause, slow.rank) == (slow_ranks.COMPUTE, 2)


def test_a_thread_that_nobody_waits_for_makes_no_other_rank_slow() -> None:
    starved: Callable[[int], float] = {0: 0.0, 1: 0.2, 2: 0.2, 3: 0.2}.__getitem__
    assert list(heard(200, fine, reported(starved))) == []


def test_a_loader_that_waits_for_a_core_is_not_slow() -> None:
    starved: Callable[[int], float] = {0: 0.0, 1: 0.5, 2: 0.0, 3: 0.0}.__getitem__

    def measured(step: int, rank: int) -> Step:
        return Step(0.9, 0.3, 0.01 + starved(rank), 0.59 - starved(rank))

    assert [slow.cause for _, slow in heard(200, measured)] == [slow_ranks.DATA]
    assert list(heard(200, measured, reported(starved))) == []


SPIN = "import os; os.sched_setaffinity(0, {CPU})\nprint(flush=True)\nwhile True: pass"


@pytest.mark.skipif(not any(cores.delays()), reason="this kernel counts no delays")
def test_a_thread_that_shares_its_core_is_denied_part_of_it() -> None:
    allowed = os.sched_getaffinity(0)
    cpu = min(allowed)
    with subprocess.Popen(
        [sys.executable, "-c", SPIN.replace("CPU", str(cpu))], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        os.sched_setaffinity(0, {cpu})
        try:
            denied, total = cores.Denied(), 0.0
            assert denied.seconds() == 0.0, "too soon"
            while total == 0.0:
                total = denied.seconds()
        finally:
            os.sched_setaffinity(0, allowed)
            other.kill()
    assert total > 0.0


# -- real ranks, slowed for real ------------------------------------------------------------------

ONSET = 3  # the step from which on everything is slow


def stop_and_go(pid: int) -> None:
    """Stop a process for half of the time, as a limit of its processor time would."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)


class Samples(Dataset[Any]):
    """Rank 0's loader stalls."""

    def __len__(self) -> int:
        return 2 * 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= 2 * ONSET and os.environ["RANK"] == "0":
            time.sleep(0.3)
        return torch.ones(4), torch.zeros(1)


def computes(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    for _ in range(40):  # in the processor's own small pieces, so that a stop counts
        time.sleep(0.01)
    return (model(batch[0]) - batch[1]).square().sum(), 1


def slowed(directory: Path) -> None:
    """Rank 1 is stopped half of the time, and its disk is slow."""
    rank = int(os.environ["RANK"])
    stopping: list[multiprocessing.Process] = []
    sync = os.fsync

    def begin(made: Trainer) -> None:
        if made.state.step == ONSET and rank == 1:
            ours = multiprocessing.get_context("fork").Process(
                target=stop_and_go, args=(os.getpid(),), daemon=True
            )
            ours.start()
            stopping.append(ours)

    def slow_sync(descriptor: int) -> None:
        if rank == 1 and threading.current_thread() is not threading.main_thread():
            time.sleep(2.0)
        sync(descriptor)

    os.fsync = slow_sync
    model = nn.Linear(4, 1)
    made = Trainer(model, torch.optim.SGD, step=computes, strategy="ddp", on_step_end=begin)
    try:
        made.train(
            DataLoader(Samples(), batch_size=1),
            max_period="28 steps",
            save_every="6 steps",
            save_to=directory / "kept",
        )
    finally:
        for process in stopping:
            process.kill()
            os.kill(os.getpid(), signal.SIGCONT)


def test_what_is_slow_in_real_ranks_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "reports")
    pipe = os.open(tmp_path / "reports", os.O_RDWR | os.O_NONBLOCK)
    job = Job(str(tmp_path), [1, 1], {}, call="tests.engine.observe.test_stragglers:slowed")
    assert run(job) == [[0, 0]], job.output() + job.output(1)
    told = [line for line in job.output().splitlines() if line.startswith("slow ")]
    events = [from_report(parse(line)) for line in os.read(pipe, 1 << 16).splitlines()]
    os.close(pipe)
    assert all(isinstance(event, RankSlow) for event in events)
    assert sorted(line.partition(" on ")[0] for line in told) == [
        "slow compute: rank 1",
        "slow data loader: rank 0",
        "slow disk: rank 1",
    ], told
    assert sorted(event.text for event in events if isinstance(event, RankSlow)) == sorted(told)
    quick = [event for event in events if isinstance(event, RankSlow) and "disk" not in event.cause]
    assert all(event.step <= ONSET + 20 for event in quick)
