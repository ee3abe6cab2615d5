"""The parts of a job's time add up to the wall clock for any report of its engine."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.records import goodput
from orchestrator.records.experiment import Attempt, JobRecord
from orchestrator.records.goodput import Account, Span
from orchestrator.records.outcome import JobVerdict
from tests.records.one_node import NODE


def parts(**seconds: float) -> dict[str, float]:
    return {**dict.fromkeys(goodput.PARTS, 0.0), **seconds}


ONE = Account(began=110, trains=115, first=0, time=190, step=70, data=5, checkpoints=10)


@pytest.mark.parametrize(
    ("spans", "told", "expected"),
    [
        ([Span(1, 100, 195)], {1: ONE},
         parts(start=10, load=5, training=60, data=5, checkpoints=10, stop=5)),
        # It hung after its last step and was ended when that was seen.
        ([Span(1, 100, 205, failed=202)], {1: ONE},
         parts(start=10, load=5, training=60, data=5, checkpoints=10, detection=12, stop=3)),
        # The second attempt goes on from step 50 and does 20 of its 60 steps once more.
        ([Span(1, 100, 205, failed=202), Span(2, 206, 276)],
         {1: ONE, 2: Account(began=210, trains=211, first=50, time=271, step=110, data=0,
                          checkpoints=0)},
         parts(start=15, load=6, training=100, replayed=20, data=5, checkpoints=10, detection=12,
               stop=8)),
        # The first end is not known to have been a failure, and then a rank was killed.
        ([Span(1, 100, 205), Span(2, 206, 276, failed=273), Span(3, 280, 290)],
         {1: ONE,
          2: Account(began=210, trains=211, first=70, time=271, step=130, data=0, checkpoints=0)},
         parts(start=19, load=6, training=120, data=5, checkpoints=10, detection=2, stop=18,
               unknown=10)),
        # It goes on, and has told nothing for five seconds.
        ([Span(1, 100, 195, goes_on=True)], {1: ONE},
         parts(start=10, load=5, training=60, data=5, checkpoints=10, unknown=5)),
        # A script of one's own: its ranks ran from 108 on.
        ([Span(1, 100, 200, failed=195, ranks=108)], {}, parts(start=8, unknown=87, stop=5)),
        ([Span(1, 100, 200)], {}, parts(unknown=100)),
        # It was ended before its first step.
        ([Span(1, 100, 130, failed=120)],
         {1: Account(began=110, trains=None, first=0, time=112, step=0, data=0, checkpoints=0)},
         parts(start=10, load=2, detection=8, stop=10)),
    ],
)  # fmt: skip
def test_divide_splits_wall_time(
    spans: list[Span], told: dict[int, Account], expected: dict[str, float]
) -> None:
    assert goodput.divide_time(spans, told) == pytest.approx(expected)


NUMBERS = st.floats(-1e3, 1e3)
STEPS = st.integers(-5, 500)


@given(
    st.lists(st.tuples(*[st.floats(0, 100)] * 2, *[st.none() | NUMBERS] * 2),
             min_size=1, max_size=4),
    st.lists(st.tuples(NUMBERS, st.none() | NUMBERS, STEPS, NUMBERS, STEPS,
                       *[st.floats(0, 1e3)] * 2), max_size=4),
)  # fmt: skip
def test_parts_add_up_and_none_is_negative(
    lasting: list[tuple[float, float, float | None, float | None]],
    told: list[tuple[float, float | None, int, float, int, float, float]],
) -> None:
    spans, at = [], 0.0
    for number, (pause, lasts, failed, ranks) in enumerate(lasting, 1):
        spans.append(Span(number, at + pause, at + pause + lasts, failed, ranks))
        at += pause + lasts
    found = goodput.divide_time(spans, {n: Account(*values) for n, values in enumerate(told, 1)})
    assert sum(found.values()) == pytest.approx(at - spans[0].started)
    assert all(seconds >= -1e-9 for seconds in found.values())


def told_in(path: Path, *lines: bytes) -> dict[int, Account]:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return goodput.accounts_in(path)


def test_only_whole_lines_count(tmp_path: Path) -> None:
    line = json.dumps({**vars(ONE), "attempt": 1}).encode()
    later = json.dumps({**vars(ONE), "step": 71, "attempt": 1}).encode()
    read = told_in(tmp_path / "x", line, later, b"[]", b'{"attempt": 2}', b"\xff", later[:30])
    assert {number: told.step for number, told in read.items()} == {1: 71}
    # The clock of rank 0's node is an hour behind.
    (told,) = goodput.accounts_in(tmp_path / "x", [Span(1, 0, 0, clock=-3600)]).values()
    assert (told.began, told.trains, told.time) == (3710, 3715, 3790)


def test_goodput_skips_lines_with_invalid_numbers(tmp_path: Path) -> None:
    line = {**vars(ONE), "attempt": 1}
    whole = json.dumps(line).encode()
    assert told_in(tmp_path / "x", whole, b"[" * 100_000).keys() == {1}
    names = ("attempt", "began", "trains", "first", "time", "step", "data")
    values = (float("nan"), float("inf"), 10**400, -(10**400), "x", [], {})
    for name, bad in itertools.product(names, values):
        wrong = json.dumps({**line, name: bad}).encode()
        assert told_in(tmp_path / "y", wrong) == {}, (name, bad)


def attempt(number: int, started: float, ended: float, *, restarted: bool) -> Attempt:
    verdict = JobVerdict(time=ended - 1)
    return Attempt(number, started, ended, "failed", 1, verdict, [], restarted=restarted)


def record(state: str, *attempts: Attempt, ended: float | None = None) -> JobRecord:
    verdict = JobVerdict(time=ended - 2) if ended and not attempts else None
    made = JobRecord("j", "e", state, [], [], 100.0, attempts=list(attempts), ended=ended)
    return replace(made, verdict=verdict)


@pytest.mark.parametrize(
    ("known", "spans"),
    [
        (record("running"), [Span(1, 100, 400, goes_on=True)]),
        (record("failed", ended=300.0), [Span(1, 100, 300, 298)]),
        (record("stopped", ended=300.0), [Span(1, 100, 300)]),
        (record("starting"), [Span(1, 100, 400, ranks=400, goes_on=True)]),
        (record("restarting", attempt(1, 100, 200, restarted=True)),
         [Span(1, 100, 200, 199), Span(2, 200, 400, ranks=400, goes_on=True)]),
        (record("running", attempt(1, 100, 200, restarted=True)),
         [Span(1, 100, 200, 199), Span(2, 200, 400, goes_on=True)]),
        (record("running", replace(attempt(1, 100, 200, restarted=True), verdict=None, ran=80.0)),
         [Span(1, 100, 200, ranks=120), Span(2, 200, 400, goes_on=True)]),
        (replace(record("running", replace(attempt(1, 100, 200, restarted=True), clock=9.0)),
                 nodes=[replace(NODE, clock=-7.0)]),
         [Span(1, 100, 200, 199, clock=9), Span(2, 200, 400, clock=-7, goes_on=True)]),
        (record("failed", attempt(1, 100, 200, restarted=True),
                attempt(2, 200, 300, restarted=False), ended=300.0),
         [Span(1, 100, 200, 199), Span(2, 200, 300, 299)]),
    ],
)  # fmt: skip
def test_spans_of_reads_attempts_of_record(known: JobRecord, spans: list[Span]) -> None:
    assert goodput.spans_of(known, 400.0) == spans


def test_in_words_lists_largest_parts() -> None:
    assert (
        goodput.shares_in_words(parts(training=90, start=9.8, stop=0.2))
        == "90% training, 10% start"
    )
    assert goodput.shares_in_words(parts()) == ""
    assert goodput.shares_in_words(parts(unknown=7, start=1)) == ""
