"""The results of a node's probe, as the plan wants them. Equal machines give equal parts."""

from __future__ import annotations

from typing import Any

from orchestrator.protocol.facts import Interface
from orchestrator.protocol.message import encode
from orchestrator.protocol.requests.machine import Probed


class Facts(Probed):
    """One machine: what its node reported, and how far its clock is from the head's."""

    clock_offset: float = 0.0  # the node's clock minus the head's, seconds

    @property
    def target_kind(self) -> str:
        return self.target.kind

    @property
    def target_name(self) -> str:
        return self.target.name

    def to_json(self) -> dict[str, Any]:
        data = encode(self, nones=True)
        del data["target"], data["time"]
        return {**data, "target_kind": self.target_kind, "target_name": self.target_name}

    def interface(self, name: str) -> Interface | None:
        return next((interface for interface in self.interfaces if interface.name == name), None)

    def same_machine(self, other: Facts) -> bool:
        """Tell whether two names lead to one network stack."""
        return bool(self.boot) and (self.boot, self.network) == (other.boot, other.network)
