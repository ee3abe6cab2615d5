from __future__ import annotations

import random
from typing import Any

import pytest

from orchestrator.head.verdict import Failure, cause, of_rank


def ended(code: int, error: dict[str, Any] | None = None, rank: int = 3) -> dict[str, Any]:
    return {"rank": rank, "code": code, "error": error, "time": 1000.0}


def error(message: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "ValueError",
        "message": message,
        "traceback": f"Traceback ...\nValueError: {message}\n",
        "time": 999.5,
        "file": "/w/train.py",
        "line": 12,
        "function": "step",
        **fields,
    }


# -- one rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (3, "exit", "ended with exit code 3"),
        (-9, "signal", "killed by signal 9 (SIGKILL)"),
        (-11, "signal", "killed by signal 11 (SIGSEGV)"),
        (-34, "signal", "killed by signal 34 (SIGRTMIN)"),
        (-50, "signal", "killed by signal 50 (unknown)"),
    ],
)
def test_an_end_without_an_exception(code: int, kind: str, message: str) -> None:
    failure = of_rank(1, "gpu02", ended(code), 50.0)
    assert (failure.kind, failure.message, failure.time) == (kind, message, 50.0)
    assert failure.who == "rank 3 on node 1 (gpu02)"
    assert not failure.echo


def test_an_exception_has_the_users_line_and_its_own_time() -> None:
    """Its time, by the head's clock: the node's is half an hour off, the report came later."""
    failure = of_rank(0, "a", ended(1, error("no batch")), time=1000.0 - 1800.0)
    assert (failure.kind, failure.message) == ("exception", "ValueError: no batch")
    assert failure.where == "/w/train.py:12 in step"
    assert failure.time == pytest.approx(1000.0 - 1800.0 - 0.5)
    assert failure.traceback.startswith("Traceback")


def test_an_exception_that_says_little() -> None:
    failure = of_rank(0, "a", ended(1, error("", file="", line=0, function="")), 0.0)
    assert (failure.message, failure.where) == ("ValueError", "")


def test_a_kill_is_a_kill_even_after_an_exception() -> None:
    """The error file is of an earlier exception that the program lived through."""
    assert of_rank(0, "a", ended(-9, error("x")), 0.0).kind == "signal"


# -- echoes -----------------------------------------------------------------------------------

ECHOES = [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41",
    "[..pair.cc:553] Read error [10.0.0.2]:41: Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:2006, unhandled"
    " system error, NCCL version 2.21.5",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exited",
    "torch.distributed.DistNetworkError: The client socket has failed to connect to any network"
    " address of (10.0.0.1, 29500)",
    "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 joined",
    "wait timeout after 600000ms, keys: /default_pg/0//cpu//0/1",
    "[Errno 32] Broken pipe",
    "[Errno 111] Connection refused",
    "failed to recv, got 0 bytes: recvBytes",
]


@pytest.mark.parametrize("words", ECHOES)
def test_what_a_rank_says_when_another_is_gone(words: str) -> None:
    kind = words.split(":", maxsplit=1)[0].rpartition(".")[2] if ": " in words else "RuntimeError"
    echo = of_rank(0, "a", ended(1, error(words, type=kind)), 0.0)
    assert echo.echo


@pytest.mark.parametrize(
    "words",
    ["CUDA out of memory. Tried to allocate 2.00 GiB", "index 7 is out of bounds", "no such file",
     "CUDA error: device-side assert triggered", "loss is nan", "mat1 and mat2 shapes"],
)  # fmt: skip
def test_what_a_rank_says_of_itself(words: str) -> None:
    assert not of_rank(0, "a", ended(1, error(words)), 0.0).echo


# -- the cause --------------------------------------------------------------------------------


def failure(time: float, kind: str, message: str = "its own", rank: int | None = 0) -> Failure:
    return Failure(0, "a", rank, time, kind, message)


ECHO = ECHOES[0]


@pytest.mark.parametrize(
    ("failures", "wanted"),
    [
        ([], None),
        ([failure(1, "exit")], 0),
        ([failure(2, "exit"), failure(1, "exception")], 1),
        # An echo may be reported first: what it echoes was slower to be noticed.
        ([failure(1, "exception", ECHO), failure(2, "exception")], 1),
        ([failure(1, "exception", ECHO), failure(2, "signal")], 1),
        ([failure(1, "exception", ECHO), failure(9, "lost", rank=None)], 1),
        ([failure(1, "exception", ECHO), failure(9, "supervisor", rank=None)], 1),
        # Echoes alone: the first of them.
        ([failure(2, "exception", ECHO), failure(1, "exception", ECHO)], 1),
        # Torchrun fails because a rank did; a supervisor is killed with all the rest.
        ([failure(1, "torchrun", rank=None), failure(2, "exception")], 1),
        ([failure(1, "supervisor", rank=None), failure(2, "exit")], 1),
        ([failure(1, "torchrun", rank=None), failure(2, "exception", ECHO)], 0),
        # A lost node is a cause like any other.
        ([failure(1, "lost", rank=None), failure(2, "exit")], 0),
    ],
)
def test_the_cause(failures: list[Failure], wanted: int | None) -> None:
    expected = None if wanted is None else failures[wanted]
    assert cause(failures) is expected
    # In whatever order they were heard of.
    for _ in range(5):
        shuffled = random.sample(failures, len(failures))
        assert cause(shuffled) == expected


def test_who_it_was() -> None:
    assert failure(0, "lost", rank=None).who == "node 0 (a)"
