"""Types and decodes what supervisors hear: lines on their socket, and lines of one another.

A server may meet a supervisor of another version, and nodes that were launched by hand may run
different ones: unknown keys are passed over. The supervisor sends a newline to every listener on
its socket when there is something new in its files, and nothing else.
"""

from __future__ import annotations

import json
from typing import Any, Optional, Union

from orchestrator.protocol.events import EndOrder
from orchestrator.protocol.message import Message, Moment, decode, encode, parse


class HeadNews(Message):
    """A head is attached to this connection, or left on purpose."""

    head: str  # "here" or "left"
    at: Moment  # by the head's clock


class PeerWord(Message):
    """One beat of a supervisor: all it knows, as this may be the first that arrives."""

    node: int
    head: tuple[bool, float, float]  # is there one; when did one last come, and leave on purpose?
    end: Optional[EndOrder] = None
    done: bool = False  # this node's part is over


def to_line(message: Message) -> bytes:
    return json.dumps(encode(message)).encode("ascii") + b"\n"


def from_line(line: bytes) -> Union[EndOrder, HeadNews]:
    """Return what a line on the supervisor's socket says."""
    data = parse(line)
    return (
        decode(HeadNews, data, newer=True) if "head" in data else decode(EndOrder, data, newer=True)
    )


def peer_word(data: dict[str, Any]) -> PeerWord:
    return decode(PeerWord, data, newer=True)
