"""Types of what a rank and its keeper report to their supervisor.

The rank shares a process with the user's program, so it imports nothing of ours at run time: it
writes these as plain dicts, and the type checker holds them. To each it adds its rank, its local
rank and the time; the supervisor reads the line as the event of the same name with "rank_" before.
"""

from __future__ import annotations

from typing import Literal, Optional, TypedDict, Union


class Started(TypedDict):
    event: Literal["started"]
    pid: int
    keeper: int


class Exit(TypedDict):
    event: Literal["exit"]
    code: str


class ErrorRecord(TypedDict):
    """Also the content of error_<local rank>.json."""

    type: str
    message: str
    traceback: str
    time: float
    pid: int
    file: str
    line: int
    function: str


class Raised(TypedDict):
    event: Literal["raised"]
    error: ErrorRecord


UNSAVED = "no checkpoint"  # a cause that holds no rank up


class Slow(TypedDict):
    """Written by the engine (engine/ranks/supervisor.py)."""

    event: Literal["slow"]
    cause: str
    who: int
    node: int
    step: int
    text: str


class Finished(TypedDict):
    event: Literal["finished"]


class Ended(TypedDict):
    event: Literal["ended"]
    pid: int
    code: int
    peak_kb: Optional[int]


Report = Union[Started, Exit, Raised, Slow, Finished, Ended]


class TargetRecord(TypedDict):
    kind: str
    name: str
    args: list[str]


class AttemptRecord(TypedDict):
    number: int
    restarts: int
    first_job: str


class RankSpec(TypedDict):
    """The part of spec.json that a rank reads."""

    attempt: Optional[AttemptRecord]
    rank_env: list[str]
    hosts: list[str]
    job: str
    experiment: str
    node: int
    nnodes: int
    start: str
    warm: float
    workdir: str
    target: TargetRecord
    env: dict[str, str]
    secrets: list[str]
