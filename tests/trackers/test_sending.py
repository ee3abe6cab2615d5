"""A tracker that is slow or fails costs its own curves and nothing else."""

import threading
from collections.abc import Callable, Mapping

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.trackers import known
from orchestrator.trackers.known import Sending


class Slow:
    """Takes a line when it is told to."""

    def __init__(self) -> None:
        self.may, self.took = threading.Semaphore(0), threading.Semaphore(0)
        self.heard: list[tuple[Mapping[str, float], int, float]] = []
        self.closed = False

    def log(self, values: Mapping[str, float], step: int, moment: float) -> None:
        self.took.release()
        assert self.may.acquire(timeout=60)
        if "bad" in values:
            raise ConnectionError("no network")
        self.heard.append((values, step, moment))

    def close(self) -> None:
        self.closed = True


def test_queue_of_slow_tracker_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known, "WAITING_LINES", 3)
    slow, said = Slow(), list[str]()
    to = Sending("slow", lambda: slow, said.append)
    to.log({"loss": 0.0}, 0, 10.0)
    # The first entry is out of the queue.
    assert slow.took.acquire(timeout=60)
    for step in range(1, 7):
        to.log({"loss": float(step)}, step, 10.0 + step)
    assert said == ["WARNING: slow is too slow: some values are left out there"]
    assert to.left_out == 3
    slow.may.release(9)
    to.close()
    assert slow.heard == [({"loss": float(step)}, step, 10.0 + step) for step in range(4)]
    assert slow.closed


def test_failing_tracker_is_reported_once() -> None:
    slow, said = Slow(), list[str]()
    to = Sending("slow", lambda: slow, said.append)
    slow.may.release(9)
    to.log({"bad": 1.0}, 1)
    to.thread.join(60)
    to.log({"loss": 1.0}, 2)
    to.close()
    to.close()
    assert said == ["WARNING: slow failed and is switched off from now on: no network"]
    assert slow.heard == []


def test_close_waits_for_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "LAST_SECONDS", 0.05)
    slow, said = Slow(), list[str]()
    to = Sending("slow", lambda: slow, said.append)
    to.log({"loss": 1.0}, 1)
    to.close()
    assert said == ["WARNING: slow did not take all values within 0.05 s"]
    slow.may.release()
    to.thread.join(60)


def raises(error: BaseException) -> Callable[[], Slow]:
    def opens() -> Slow:
        raise error

    return opens


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("no server"), "no server"),
        (SystemExit("log in first"), "log in first"),
        (OSError(), "OSError"),
    ],
)
def test_tracker_that_cannot_open_costs_one_warning(error: BaseException, said: str) -> None:
    heard = list[str]()
    to = Sending("shut", raises(error), heard.append)
    to.wait_open()
    to.log({"loss": 1.0}, 1)
    to.close()
    assert heard == [f"WARNING: shut could not be opened, and gets no values: {said}"]
    assert to.failed and to.sent == 0


def test_usage_error_of_tracker_is_raised() -> None:
    heard = list[str]()
    to = Sending("strict", raises(UsageError("no such option")), heard.append)
    with pytest.raises(UsageError, match="no such option"):
        to.wait_open()
    assert heard == []


def test_tracker_that_opens_late_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "LAST_SECONDS", 0.05)
    may, slow, heard = threading.Event(), Slow(), list[str]()

    def opens() -> Slow:
        assert may.wait(60)
        return slow

    to = Sending("late", opens, heard.append)
    to.wait_open(0.01)
    to.log({"loss": 1.0}, 1, 2.0)
    assert heard == ["late does not open yet; nothing waits for it"]
    to.close()
    assert heard[1:] == ["WARNING: late did not take all values within 0.05 s"]
    slow.may.release()
    may.set()
    to.thread.join(60)
    assert slow.heard == [({"loss": 1.0}, 1, 2.0)], "it gets what was kept for it"
