"""Say which GPUs or slots of a machine a launch wants for itself."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config.schema import Config
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan.model import EnvSetting
from orchestrator.protocol.requests.claims import VISIBLE, Wish


def of(node: ProbedNode, config: Config, ranks: int, user_env: Sequence[EnvSetting]) -> Wish | None:
    """Return what a launch wants of a node; None where it lets others be."""
    launch = config.launch
    if launch.claim == "none":
        return None
    env = {**config.env, **{setting.name: setting.value for setting in user_env}}
    return Wish(
        job=launch.name,
        gpus=launch.gpus,
        visible=next((env[name] for name in VISIBLE if env.get(name)), ""),
        slots=ranks,
        of=max(ranks, node.node.slots or 0),
        needed=bool(node.facts.gpus or launch.gpus) or launch.claim == "all" or launch.queue,
    )
