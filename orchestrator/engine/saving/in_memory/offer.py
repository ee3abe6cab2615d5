"""The announcement of a state to the next node, before it is sent there."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.engine.saving.in_memory import memory_file
from orchestrator.engine.saving.in_memory.memory_file import (
    Damaged,
    Head,
)

LONGEST_ATTEMPT = 32
OFFER_SIZE = 2 * memory_file.HEAD_SIZE + LONGEST_ATTEMPT


@dataclass(frozen=True)
class Offer:
    """Announce a state to the next node, before it is sent there."""

    head: Head
    constant: Head = Head()  # noqa: RUF009 (it is frozen)
    attempt: str = ""  # which wrote the constant part

    def packed(self) -> bytes:
        name = self.attempt.encode().ljust(LONGEST_ATTEMPT)
        return self.head.packed() + self.constant.packed() + name

    @classmethod
    def unpacked(cls, data: bytes) -> Offer:
        size = memory_file.HEAD_SIZE
        attempt = data[2 * size :].decode(errors="replace").strip()
        if attempt and not memory_file.ATTEMPT.fullmatch(attempt):
            raise Damaged("the constant part has no name")
        return cls(Head.unpacked(data[:size]), Head.unpacked(data[size : 2 * size]), attempt)
