"""Warns of network variables of the user that fit nothing on a node or have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan.model import EnvSetting, NodePlan
from orchestrator.head.plan.nccl_env import is_unmatched

OF_THE_LAUNCH = {  # A launch sets these for each rank.
    "MASTER_ADDR": "the first node of the list is the master",
    "MASTER_PORT": "--master-port chooses it",
    "WORLD_SIZE": "--nproc and --nnodes choose it",
    "RANK": "the order of the node list numbers the nodes",
    "LOCAL_RANK": "--nproc N starts N ranks per node",
    "NODE_RANK": "the order of the node list numbers the nodes",
}


def warnings(nodes: Iterable[tuple[ProbedNode, NodePlan]]) -> list[str]:
    """Warn of what a user set, and that fits nothing on a node or has no effect."""
    found: dict[str, None] = {}
    for machine, node in nodes:
        for setting in node.settings:
            if setting.yours and node.env.get(setting.name) == setting.value:
                found.update(dict.fromkeys(problems_there(setting, machine)))
            if setting.yours:
                found.update(dict.fromkeys(problems_anywhere(setting)))
    return [f"WARNING: {problem}" for problem in found]


def problems_there(setting: EnvSetting, machine: ProbedNode) -> Iterator[str]:
    name, value = setting.name, setting.value
    shown = f"{name}={value} ({setting.why})"
    if is_unmatched(name, value, machine):
        has = ", ".join(sorted({item.interface for item in machine.facts.addresses}))
        yield f"{shown} fits no interface of {machine.name}: {has}"
    elif name in ("NCCL_IB_HCA", "UCX_NET_DEVICES") and not fits_a_device(name, value, machine):
        cards = ", ".join(sorted({port.device for port in machine.facts.rdma}))
        has = cards or "it has no InfiniBand or RoCE"
        yield f"{shown} fits no device of {machine.name}: {has}"


def fits_a_device(name: str, value: str, machine: ProbedNode) -> bool:
    """Return True if a list of cards names one that is there, as NCCL or UCX reads it."""
    cards = {port.device for port in machine.facts.rdma}
    words = [word.partition(":")[0] for word in value.lstrip("^=").split(",") if word]
    if name == "UCX_NET_DEVICES":
        cards |= {interface.name for interface in machine.facts.interfaces}
        cards |= {address.interface for address in machine.facts.addresses}
        return "all" in words or any(word in cards for word in words)
    exact = "=" in value[:2]
    if value.startswith("^") or not words:
        return True
    return any(card == word if exact else card.startswith(word) for card in cards for word in words)


def problems_anywhere(setting: EnvSetting) -> Iterator[str]:
    name = setting.name
    if name in OF_THE_LAUNCH:
        yield f"{name} ({setting.why}) does not reach the ranks: {OF_THE_LAUNCH[name]}"
