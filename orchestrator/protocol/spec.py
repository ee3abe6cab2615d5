"""The job's spec: what a node needs to know to run its part. Sent by the head, kept as spec.json.

The supervisor, the ranks and the engine read that file; a supervisor of an earlier version may have
written it, so every key that was added since has a default.
"""

from __future__ import annotations

from typing import Any, Optional

from orchestrator.protocol.message import Message
from orchestrator.protocol.timing import BEATS_IN_A_LEASE, PEER_BEAT
from orchestrator.protocol.version import Version


class Target(Message):
    """The user's program."""

    kind: str  # script, module, program, engine
    name: str
    args: tuple[str, ...] = ()


class LeaseTerms(Message):
    """Tells the supervisors of a job how to find each other, and when to end it by themselves."""

    seconds: float = PEER_BEAT * BEATS_IN_A_LEASE  # without a word of node 0
    address: str = ""  # node 0's supervisor,
    port: int = 0  # which listens here; 0: there are no others, or it cannot
    token: str = ""  # known to the supervisors alone
    wait: bool = False  # for a node that does not answer, however long
    head: str = "continue"  # or "stop": what happens without a head
    attached: bool = True  # a head follows from the start
    grace: float = 0.0  # for the ranks to save, when there is no head
    fd: Optional[int] = None  # node 0: the open socket that the supervisor inherits


class Attempt(Message):
    """Tells which attempt of a job this is, where a job may be restarted."""

    number: int  # from 1
    restarts: int  # how many there may be
    # This machine's part of the first attempt that it took part in: all share what lies there.
    first_job: str
    first_node: int
    log: int = 0  # bytes of this node's log, at the head, that are earlier attempts'
    ranks: int = 0  # of the first attempt, on all nodes; 0: nobody knows


class Spec(Message):
    """One node's part of a job."""

    job: str
    node: int
    nnodes: int
    experiment: str  # its name
    nproc: int
    first_rank: int
    start: str  # fork or plain: how torchrun starts the ranks
    agent: tuple[str, ...]  # torchrun's command line
    env: dict[str, str]
    unset: tuple[str, ...]
    workdir: str
    target: Target
    config: Optional[dict[str, Any]] = None  # the user's own, which the engine reads
    lease: Optional[LeaseTerms] = None
    port: int = 0  # the master's, on its node: free again when the job is over
    files: tuple[tuple[str, str], ...] = ()  # name and text, for torchrun to find
    library: str = ""  # on the node: where the supervisor's program is
    warm: float = 0.0  # seconds for which processes stay ready after the job; 0: none do
    fresh: bool = False  # use none that are ready
    secrets: tuple[str, ...] = ()  # names in env whose values go nowhere else
    umask: int = -1  # of the login, for the ranks; -1: as the supervisor's own
    attempt: Optional[Attempt] = None
    version: Version = Version()  # of the supervisor
    machine: str = ""  # that it was started on: others may share its home
