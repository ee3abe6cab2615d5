"""Start ranks by `accelerate launch`: read and check its config file, write one for each node.

Accelerate runs torchrun in its own process, and torchrun starts our node/job/ranks/rank.py. So
logs, verdict and stop are the same as without accelerate. All functions but read() are pure.
Accelerate itself rejects unknown keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.common.text import plural
from orchestrator.config.launch import Launch
from orchestrator.config.schema import Config
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan.model import EnvSetting, Layout, NodePlan, Plan

PROGRAM = "accelerate.commands.launch"
BY_TORCHRUN = (
    *("MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU"),
    *("MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON"),
)
# These types need a GPU: without one accelerate silently leaves each rank on its own.
FOR_CUDA = ("MULTI_GPU", "FSDP")


@dataclass(frozen=True)
class Accelerate:
    """The keys of an accelerate config file; both are empty without a file."""

    file: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str, least: int = 0) -> int | None:
        value = self.keys.get(name)
        if value is None or (name == "num_processes" and value == -1):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name} is {value!r} in {self.file}: a number from {least} on")
        return value

    @property
    def kind(self) -> str:
        return str(self.keys.get("distributed_type") or "MULTI_GPU")


# -- the file -------------------------------------------------------------------------------------


def asked_options(start_with: str | None, file: Path | None, kind: str) -> Accelerate | None:
    """Return the options of --start-with accelerate or --accelerate-config, None without them."""
    if file is None and start_with != "accelerate":
        return None
    if kind == "engine":
        raise UsageError(
            "accelerate is for a script of yours that uses it; the built-in engine does not",
            "name a script, or leave out --start-with accelerate and --accelerate-config",
        )
    return read_file(file) if file is not None else Accelerate()


def read_file(file: Path) -> Accelerate:
    """Read a file of `accelerate config`; raise UsageError for wrong types of its keys.

    plan_accelerate() checks the values against the nodes.
    """
    import yaml

    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"accelerate's file {file} cannot be read: {reason}") from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"accelerate's file {file} must hold keys such as `num_machines: 2`")
    by = Accelerate(str(file), data)
    known = (*BY_TORCHRUN, "MULTI_CPU", "NO")
    if by.kind not in known:
        raise UsageError(
            f"distributed_type is {by.kind!r} in {file}; these can be started: {', '.join(known)}"
        )
    for name, least in (("num_machines", 1), ("num_processes", 1), ("main_process_port", 0)):
        by.number(name, least)
    return by


def settle_launch(launch: Launch, by: Accelerate) -> Launch:
    """Return the launch with plain start, and the file's port unless --master-port sets one."""
    port = launch.master_port or by.number("main_process_port") or None
    return replace(launch, start="plain", master_port=port)


def count_ranks(config: Config, by: Accelerate, nodes: Sequence[ProbedNode], nnodes: int) -> Config:
    """Return the config with the file's number of ranks if neither options nor nodes decide it."""
    world = by.number("num_processes", 1)
    silent = all(node.node.slots is None and not node.facts.gpus for node in nodes)
    if config.launch.nproc is not None or world is None or not silent or world % nnodes:
        return config
    return replace(config, launch=replace(config.launch, nproc=world // nnodes))


# -- the plan -------------------------------------------------------------------------------------


def plan_accelerate(
    plan: Plan, by: Accelerate, nodes: Sequence[ProbedNode], agreed: Layout | None = None
) -> Plan:
    """Return the plan with accelerate in place of torchrun; raise if it does not fit the nodes."""
    check_installed(nodes)
    counts = agreed.counts if agreed else [node.nproc for node in plan.nodes]
    check_counts(by, counts)
    cpu = on_cpu(by, nodes)
    versions = ", ".join(sorted({node.facts.accelerate for node in nodes}))
    notes = [f"started by accelerate launch ({versions})"]
    if cpu and not by.keys.get("use_cpu"):
        notes.append("no GPU: accelerate is set to use the CPU (ACCELERATE_USE_CPU)")
    ip = by.keys.get("main_process_ip")
    if ip not in (None, plan.master_address):
        notes.append(f"main_process_ip {ip}: the nodes reach the master at {plan.master_address}")
    keys = keys_of(by, plan, counts, cpu)
    plans = tuple(of_node(node, keys, cpu) for node in plan.nodes)
    return replace(plan, nodes=plans, notes=(*plan.notes, *notes))


def check_installed(nodes: Sequence[ProbedNode]) -> None:
    for node in nodes:
        if not node.facts.accelerate:
            raise CheckFailed(
                f"there is no accelerate on {node.name} ({node.facts.python})",
                "pip install accelerate there, or name a Python that has it: --python PATH",
            )


def check_counts(by: Accelerate, counts: Sequence[int]) -> None:
    if len(set(counts)) > 1:
        raise CheckFailed(
            "accelerate starts as many processes on one machine as on the other, and these have"
            f" {', '.join(map(str, counts))}",
            "--nproc N, and the same slots= in the list; or leave out accelerate",
        )
    wanted = by.number("num_machines", 1)
    if wanted not in (None, len(counts)):
        raise CheckFailed(
            f"num_machines is {wanted} in {by.file}, but the job has {plural(len(counts), 'node')}",
            "correct one of them; left out of the file, it is computed",
        )
    world = by.number("num_processes", 1)
    if world not in (None, sum(counts)):
        raise CheckFailed(
            f"num_processes is {world} in {by.file}, but these {len(counts)} nodes run"
            f" {sum(counts)} ranks ({counts[0]} each)",
            "num_processes counts all machines together; --nproc N is for each of them",
        )
    if by.kind == "NO" and sum(counts) > 1:
        raise CheckFailed(
            f"distributed_type is NO in {by.file}: {sum(counts)} ranks would each be alone",
            "write distributed_type: MULTI_GPU, which serves CPUs too",
        )


def on_cpu(by: Accelerate, nodes: Sequence[ProbedNode]) -> bool:
    """Return True if accelerate has to use the CPU."""
    if by.keys.get("use_cpu") or by.kind == "MULTI_CPU":
        return True
    without = [node.name for node in nodes if not node.facts.gpus]
    if by.kind not in (*FOR_CUDA, "NO") or not without:
        return False
    if len(without) < len(nodes):
        raise CheckFailed(
            f"no GPU was found on {', '.join(without)}, but on the others",
            "take these nodes out of the list, or write use_cpu: true in accelerate's file",
        )
    return True


# -- one node -------------------------------------------------------------------------------------


def of_node(node: NodePlan, keys: Mapping[str, Any], cpu: bool) -> NodePlan:
    """Return a node's plan with its own config file; its name differs as nodes may share a disk."""
    import yaml

    file = (
        # The file is in the node's run directory, where its agent starts.
        f"accelerate_node{node.index}.yaml"
    )
    command = (node.python, "-u", "-m", PROGRAM, "--config_file", file)
    setting = EnvSetting("ACCELERATE_USE_CPU", "true", "no GPU, or use_cpu in accelerate's file")
    return replace(
        node,
        agent=command,
        # Only the port changes with a restart; the file has all other values.
        placed=(("port", "--main_process_port"),),
        paste=(*command, *node.program),
        settings=(*([setting] if cpu else []), *node.settings),
        files=((file, str(yaml.safe_dump({**keys, "machine_rank": node.index}))),),
    )


def keys_of(by: Accelerate, plan: Plan, counts: Sequence[int], cpu: bool) -> dict[str, Any]:
    """Return the keys of all nodes' files: computed ones, and the user's for all others."""
    kind = by.kind if by.kind in BY_TORCHRUN else "MULTI_GPU"
    keys = {
        **by.keys,
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_machines": len(counts),
        "num_processes": sum(counts),
        "main_process_ip": plan.master_address,
        "main_process_port": plan.master_port,
        "rdzv_backend": "static",
        "same_network": True,
    }
    if cpu:
        keys["use_cpu"] = True
    if kind == "DEEPSPEED" and len(counts) > 1:
        speed = by.keys.get("deepspeed_config") or {}
        keys["deepspeed_config"] = {**speed, "deepspeed_multinode_launcher": "standard"}
    if by.kind == "MULTI_CPU":
        keys.pop("mpirun_config", None)
    return keys
