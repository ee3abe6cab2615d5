"""Types of what a rank reads of its spec, and of the error that it leaves.

The rank shares a process with the user's program, so it imports nothing of ours at run time: it
writes plain dicts, and the type checker holds these. To each report it adds its rank, its local
rank and the time; the supervisor reads the line as the event of the same name with "rank_" before.
"""

from __future__ import annotations

from typing import Optional, TypedDict

UNSAVED = "no checkpoint"  # a cause that holds no rank up


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
