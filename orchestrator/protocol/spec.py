"""The job's spec: what a node needs to know to run its part. Sent by the head, kept as spec.json.

The supervisor, the ranks and the engine read that file; a supervisor of an earlier version may have
written it, so every key that was added since has a default.
"""

from __future__ import annotations

from typing import Any, Optional

from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.claims import Wish
from orchestrator.protocol.timing import BEATS_IN_A_LEASE, PEER_BEAT, START_PATIENCE_SECONDS
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
    attached: bool = True  # a head follows from the start
    grace: float = 0.0  # for the ranks to save, when there is no head
    limit: float = 0.0  # seconds from the start until all of it has to be over; 0: never
    fd: Optional[int] = None  # node 0: the open socket that the supervisor inherits


class AttemptNumber(Message):
    """Tells which attempt of a job this is, where a job may be restarted."""

    number: int  # from 1
    restarts: int  # how many there may be
    # This machine's part of the first attempt that it took part in: all share what lies there.
    first_job: str
    first_node: int
    log: int = 0  # bytes of this node's log, at the head, that are earlier attempts'
    ranks: int = 0  # of the first attempt, on all nodes; 0: nobody knows


class Placement(Message):
    """A node's place in one attempt of a job: all that changes from one attempt to the next."""

    job: str
    node: int
    nnodes: int
    first_rank: int
    master: str  # the address where the ranks meet,
    port: int  # and the port there
    supervisors: str = ""  # the address of node 0's supervisor,
    supervisors_port: int = 0  # which listens here; 0: there are no others, or it cannot
    token: str = ""  # known to the supervisors alone
    attempt: Optional[AttemptNumber] = None
    hosts: tuple[str, ...] = ()  # addresses of all nodes, in order, if ranks are told them
    limit: float = 0.0  # seconds that are left to the job; 0: as many as it wants


class Spec(Message):
    """One node's part of a job."""

    job: str
    node: int
    nnodes: int
    experiment: str  # its name
    nproc: int
    first_rank: int
    start: str  # fork or plain: how torchrun starts the ranks
    agent: tuple[str, ...]  # torchrun's command line, without the options that `placed` names
    env: dict[str, str]
    unset: tuple[str, ...]
    workdir: str
    target: Target
    config: Optional[dict[str, Any]] = None  # the user's own, which the engine reads
    lease: Optional[LeaseTerms] = None
    placed: tuple[tuple[str, str], ...] = ()  # fields of this spec, the agent's options for them
    master: str = ""  # the address where the ranks meet,
    port: int = 0  # and the port there: on node 0 it is free again when the job is over
    files: tuple[tuple[str, str], ...] = ()  # name and text, for torchrun to find
    library: str = ""  # on the node: where the supervisor's program is
    warm: float = 0.0  # seconds for which processes stay ready after the job; 0: none do
    secrets: tuple[str, ...] = ()  # names in env whose values go nowhere else
    umask: int = -1  # of the login, for the ranks; -1: as the supervisor's own
    attempt: Optional[AttemptNumber] = None
    version: Version = Version()  # of the supervisor
    rank_env: tuple[str, ...] = ()  # variables of ranks beside torchrun's: slurm, own
    hosts: tuple[str, ...] = ()  # addresses of all nodes, in order, if ranks are told them
    machine: str = ""  # that it was started on: others may share its home
    wish: Optional[Wish] = None  # the GPUs or slots to be held for it; None: it asks for none
    claim: str = ""  # the path of its entry in the machine's book; nothing: it holds nothing
    patience: float = START_PATIENCE_SECONDS  # of the head, until this part has started

    @property
    def command(self) -> list[str]:
        """Return the agent's whole command line, up to the program."""
        return [*self.agent, *(f"{option}={getattr(self, name)}" for name, option in self.placed)]

    def at(self, place: Placement) -> Spec:
        """Return the spec of this node's part in an attempt of the job, at its place there."""
        names = {
            "ORCHESTRATOR_JOB": place.job,
            "NODE_RANK": str(place.node),
            "NNODES": str(place.nnodes),
        }
        later = place.attempt is not None and place.attempt.number > 1
        lease = self.lease and self.lease.replace(
            address=place.supervisors,
            port=place.supervisors_port,
            token=place.token,
            attached=later or self.lease.attached,
            limit=place.limit,
            fd=None,
        )
        return self.replace(
            job=place.job,
            node=place.node,
            nnodes=place.nnodes,
            first_rank=place.first_rank,
            master=place.master,
            port=place.port,
            attempt=place.attempt,
            hosts=place.hosts,
            env={**self.env, **names},
            lease=lease,
        )
