"""The job's spec: the facts that a node needs to run its part. The node stores it as spec.json.

The supervisor, the ranks and the engine read that file. A supervisor of an earlier version may have
written it, so every key that was added since has a default.
"""

from __future__ import annotations

from typing import Any, Optional

from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.claims import DeviceRequest
from orchestrator.protocol.timing import BEATS_IN_A_LEASE, PEER_BEAT, START_PATIENCE_SECONDS
from orchestrator.protocol.version import Version


class Target(Message, kw_only=False):
    """The user's program."""

    # One of script, module, program, engine; auto for a file or command that no node has looked at;
    # in the answer to a probe also missing, unreadable and so on.
    kind: str
    name: str
    args: tuple[str, ...] = ()
    # A question with a similar file name, if there is no file of this name.
    near: str = ""


class Placement(Message):
    """A node's place in one attempt of a job: everything that differs between attempts."""

    job: str
    # The node's index in this attempt.
    node: int
    nnodes: int
    first_rank: int
    # The address of the ranks' rendezvous.
    master: str = ""
    # The port of the rendezvous; on node 0 it is free again when the job is over.
    port: int = 0
    # The address of node 0's supervisor.
    supervisors: str = ""
    # The port of node 0's supervisor; 0 if there are no others, or it cannot listen.
    supervisors_port: int = 0
    # A secret that only the supervisors know.
    token: str = ""
    # The number of the node's part of the job, the same in all attempts.
    part: int = 0
    # The first attempt is number 1.
    attempt: int = 1
    # The largest number of restarts.
    restarts: int = 0
    # Bytes of this node's log at the head that belong to earlier attempts.
    log_before: int = 0
    # Ranks of the first attempt, on all nodes; 0 if unknown.
    first_ranks: int = 0
    # Addresses of all nodes in order, if the ranks receive them.
    hosts: tuple[str, ...] = ()
    # Seconds that are left to the job; 0 for no limit.
    limit: float = 0.0


class Spec(Placement):
    """One node's part of a job."""

    # The name of the experiment.
    experiment: str
    nproc: int
    # How torchrun starts the ranks: fork or plain.
    start: str
    # torchrun's command line, without the options that `placed` names.
    agent: tuple[str, ...]
    env: dict[str, str]
    unset: tuple[str, ...]
    workdir: str
    target: Target
    # The user's own config, which the engine reads.
    config: Optional[dict[str, Any]] = None
    # The node ends its part after this time without a message of node 0.
    lease_seconds: float = PEER_BEAT * BEATS_IN_A_LEASE
    # Seconds for the ranks to save if there is no head.
    grace: float = 10.0
    # True if a head follows from the start.
    attached: bool = False
    # On node 0, the socket that the supervisor inherits to listen to the others.
    listener: Optional[int] = None
    # Fields of this spec with torchrun's options for them.
    placed: tuple[tuple[str, str], ...] = ()
    # Name and text of files for torchrun's directory.
    files: tuple[tuple[str, str], ...] = ()
    # The directory of the supervisor's program on the node.
    library: str = ""
    # Seconds for which standby processes wait after the job; 0 for none.
    warm: float = 0.0
    # Names of variables in env whose values must not be shown anywhere.
    secrets: tuple[str, ...] = ()
    # The login's umask, for the ranks; -1 keeps that of the supervisor.
    umask: int = -1
    # The least free memory in GB; None for the default, 0 for any.
    memory_floor: Optional[float] = None
    # The version of the supervisor.
    version: Version = Version()
    # Changes to torchrun's variables for the ranks: slurm adds, own removes.
    rank_env: tuple[str, ...] = ()
    # The machine that it was started on: others may share its home.
    machine: str = ""
    # The GPUs or slots to reserve; None if the job requests none.
    devices: Optional[DeviceRequest] = None
    # The path of its entry in the machine's lock table; empty if nothing is reserved.
    claim: str = ""
    # Seconds that the head waits for the start of this part.
    patience: float = START_PATIENCE_SECONDS

    @property
    def command(self) -> list[str]:
        """Return torchrun's whole command line, up to the program."""
        return [*self.agent, *(f"{option}={getattr(self, name)}" for name, option in self.placed)]

    def at(self, place: Placement) -> Spec:
        """Return the spec of this node's part in a later attempt, at its place there."""
        return self.replace(
            **vars(place),
            env={
                **self.env,
                "ORCHESTRATOR_JOB": place.job,
                "NODE_RANK": str(place.node),
                "NNODES": str(place.nnodes),
            },
            attached=True,
            listener=None,
        )
