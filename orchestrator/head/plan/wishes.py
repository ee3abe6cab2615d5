"""Say which GPUs or slots of a machine a launch wants for itself."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.common.text import parse_seconds
from orchestrator.config.launch import Launch
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.protocol.requests.claims import Wish

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def of(node: ProbedNode, launch: Launch, ranks: int, env: Mapping[str, str]) -> Wish | None:
    """Return what a launch wants of a node; None where it lets others be."""
    if launch.claim == "none":
        return None
    takes = launch.duration or launch.time_limit
    return Wish(
        job=launch.name,
        gpus=launch.gpus,
        visible=next((env[name] for name in VISIBLE if env.get(name)), ""),
        slots=ranks,
        of=max(ranks, node.node.slots or 0),
        needed=bool(node.facts.gpus or launch.gpus) or launch.claim == "all" or launch.queue,
        seconds=parse_seconds("--for", takes) if takes else 0.0,
    )
