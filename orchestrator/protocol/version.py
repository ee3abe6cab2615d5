"""The versions of the protocol, and which of them understand each other.

A head ships its own server to every node, so those two always agree. A running supervisor may have
been started by another version: it writes its own Version into its first event and into spec.json,
and a server that connects to it compares. Supervisors may write more keys and new kinds of
events: readers ignore those that they do not know. A change that would mislead an older reader
raises OLDEST to the first version that reads it correctly.
"""

from __future__ import annotations

from orchestrator.common.version import __version__
from orchestrator.protocol.message import Message

PROTOCOL = 2
# Those before have no directory for each attempt.
OLDEST = 2


class Version(Message):
    """The protocol's number, and the oldest one that understands it."""

    protocol: int = 0
    oldest: int = 0
    package: str = "of an earlier version"


OWN = Version(protocol=PROTOCOL, oldest=OLDEST, package=__version__)


def version_conflict(job: str, theirs: Version, ours: Version = OWN) -> str:
    """Return why this version cannot follow that job, and what to do; empty if it can."""
    if theirs.oldest <= ours.protocol and ours.oldest <= theirs.protocol:
        return ""
    return (
        f"job {job} was started by orchestrator {theirs.package}, which speaks protocol"
        f" {theirs.protocol}; this is {ours.package} with protocol {ours.protocol}: attach with"
        f" orchestrator {theirs.package}, or end the job with `orchestrator stop`, which works"
    )
