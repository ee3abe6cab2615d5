"""Ranks started by `accelerate launch`: its file, read, checked, and written for each node.

accelerate runs torchrun in its own process, and what torchrun then starts is our
node/job/ranks/rank.py: logs, verdict and stop are what they are without accelerate.
Pure but for read().
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.common.errors import CheckFailed, UsageError, nearest
from orchestrator.common.text import plural
from orchestrator.config.launch import Launch
from orchestrator.config.schema import Config
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan.model import EnvSetting, NodePlan, Plan
from orchestrator.head.plan.plan import Layout

PROGRAM = "accelerate.commands.launch"
# The keys of accelerate 1.15, used when no node can be asked.
KEYS = (
    *("command_file", "commands", "compute_environment", "debug", "deepspeed_config"),
    *("distributed_type", "downcast_bf16", "dynamo_config", "enable_cpu_affinity", "fp8_config"),
    *("fsdp_config", "gpu_ids", "machine_rank", "main_process_ip", "main_process_port"),
    *("main_training_function", "megatron_lm_config", "mixed_precision", "mpirun_config"),
    *("num_machines", "num_processes", "parallelism_config", "rdzv_backend", "same_network"),
    *("tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone", "use_cpu"),
)
OLD_KEYS = ("fp16", "dynamo_backend")  # no longer keys, but accelerate reads them
BY_TORCHRUN = (
    *("MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU"),
    *("MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON"),
)
FOR_CUDA = ("MULTI_GPU", "FSDP")  # without one accelerate leaves each rank alone, silently


@dataclass(frozen=True)
class Accelerate:
    """The keys of an accelerate config file; there may be no file, and none."""

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


@dataclass(frozen=True)
class Machines:
    """The machines of a job, as accelerate's files describe them."""

    counts: Sequence[int]  # processes on each machine
    ip: str
    port: int

    @property
    def world(self) -> int:
        return sum(self.counts)


# -- the file -------------------------------------------------------------------------------------


def asked(start_with: str | None, file: Path | None, kind: str) -> Accelerate | None:
    """Return what --start-with accelerate or --accelerate-config asks for, or None."""
    if file is None and start_with != "accelerate":
        return None
    if kind == "engine":
        raise UsageError(
            "accelerate is for a script of yours that uses it; the built-in engine does not",
            "name a script, or leave out --start-with accelerate and --accelerate-config",
        )
    return read(file) if file is not None else Accelerate()


def read(file: Path) -> Accelerate:
    """Read a file that `accelerate config` wrote; planned() checks what only nodes can tell."""
    import yaml

    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"accelerate's file {file} cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"accelerate's file {file} is not valid YAML: {error}") from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"accelerate's file {file} must hold keys such as `num_machines: 2`")
    nodes = Accelerate(str(file), data)
    where = data.get("compute_environment") or "LOCAL_MACHINE"
    if where != "LOCAL_MACHINE":
        raise UsageError(f"compute_environment is {where!r} in {file}; here it is LOCAL_MACHINE")
    check_kind(nodes)
    machines = nodes.number("num_machines", 1)
    rank = nodes.number("machine_rank")
    if machines is not None and rank is not None and rank >= machines:
        raise UsageError(
            f"machine_rank is {rank} in {file}, but with num_machines {machines} the last is"
            f" {machines - 1}",
            "one file serves all nodes: leave machine_rank out, it is computed",
        )
    processes = nodes.number("num_processes", 1)
    if processes is not None and processes % (machines or 1):
        raise UsageError(
            f"num_processes is {processes} in {file}: {machines} machines cannot share it evenly",
            "it counts the processes of all machines: num_machines x GPUs per machine",
        )
    nodes.number("main_process_port")
    return nodes


def check_kind(by: Accelerate) -> None:
    known = (*BY_TORCHRUN, "MULTI_CPU", "NO")
    if by.kind in known:
        return
    if by.kind in ("XLA", "TPU"):
        raise UsageError(f"distributed_type is {by.kind} in {by.file}: TPUs are not started here")
    hint = nearest(by.kind, known)
    raise UsageError(
        f"distributed_type is {by.kind!r} in {by.file}, which accelerate does not know{hint}"
    )


def check_keys(by: Accelerate, known: Sequence[str], whose: str) -> None:
    for key in by.keys:
        if key not in (*known, *OLD_KEYS):
            hint = nearest(key, known)
            raise CheckFailed(
                f"unknown key {key!r} in {by.file}: {whose} does not know it{hint}",
                "correct it or take it out; or install the version that the file was made with",
            )


def settle(launch: Launch, by: Accelerate) -> Launch:
    """Apply the file: accelerate has no fork start, and its port counts like --master-port."""
    port = launch.master_port or by.number("main_process_port") or None
    return replace(launch, start="plain", master_port=port)


def counted(config: Config, by: Accelerate, nodes: Sequence[ProbedNode], nnodes: int) -> Config:
    """Take the number of ranks from the file where no node has GPUs."""
    world = by.number("num_processes", 1)
    silent = all(node.node.slots is None and not node.facts.gpus for node in nodes)
    if config.launch.nproc is not None or world is None or not silent or world % nnodes:
        return config
    return replace(config, launch=replace(config.launch, nproc=world // nnodes))


# -- the plan -------------------------------------------------------------------------------------


def planned(
    plan: Plan, by: Accelerate, nodes: Sequence[ProbedNode], agreed: Layout | None = None
) -> Plan:
    """Put accelerate in torchrun's place: on all nodes, or with `agreed` on those given."""
    first = nodes[0]
    master = {plan.master_address, agreed.master_ip if agreed else ""}
    if agreed is None or agreed.index == 0:
        addresses = [address.address for address in first.facts.addresses]
        master |= {*addresses, first.name, first.node.host, first.facts.hostname}
    for index, node in enumerate(nodes[1:], 1):
        ip = by.keys.get("main_process_ip")
        if ip not in master and ip in [address.address for address in node.facts.addresses]:
            raise CheckFailed(
                f"main_process_ip is {ip} in {by.file}, which is node {index}"
                f" ({node.name}); the master is the first of the list, {first.name}",
                "put that machine first in the list, or leave main_process_ip out of the file",
            )
    check_installed(nodes)
    counts = agreed.counts if agreed else [node.nproc for node in plan.nodes]
    machines = Machines(counts, plan.master_address, plan.master_port)
    check_counts(by, machines)
    check_master(by, machines, master)
    cpu = on_cpu(by, nodes)
    plans = tuple(of_node(by, node, machines, cpu) for node in plan.nodes)
    plan = replace(plan, nodes=plans, notes=(*plan.notes, *notes(by, machines, nodes, cpu)))
    check_known(by, nodes)
    return plan


def check_installed(nodes: Sequence[ProbedNode]) -> None:
    for node in nodes:
        if not node.facts.accelerate:
            raise CheckFailed(
                f"there is no accelerate on {node.name} ({node.facts.python})",
                "pip install accelerate there, or name a Python that has it: --python PATH",
            )


def check_known(by: Accelerate, nodes: Sequence[ProbedNode]) -> None:
    """Check that every node's accelerate knows the keys of the file."""
    for node in nodes:
        whose = f"accelerate {node.facts.accelerate} on {node.name}"
        check_keys(by, node.facts.accelerate_keys or KEYS, whose)


def check_counts(by: Accelerate, machines: Machines) -> None:
    counts = machines.counts
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
    if world not in (None, machines.world):
        raise CheckFailed(
            f"num_processes is {world} in {by.file}, but these {len(counts)} nodes run"
            f" {machines.world} ranks ({counts[0]} each)",
            "num_processes counts all machines together; --nproc N is for each of them",
        )
    gpus = str(by.keys.get("gpu_ids") or "all")
    if gpus != "all" and len(gpus.split(",")) < counts[0]:
        raise CheckFailed(
            f"gpu_ids is {gpus} in {by.file}, but each node runs {plural(counts[0], 'rank')}",
            "name a GPU for each rank, or write all",
        )
    if by.kind == "NO" and machines.world > 1:
        raise CheckFailed(
            f"distributed_type is NO in {by.file}: {machines.world} ranks would each be alone",
            "write distributed_type: MULTI_GPU, which serves CPUs too",
        )


def check_master(by: Accelerate, machines: Machines, master: set[str]) -> None:
    ip = by.keys.get("main_process_ip")
    if ip is not None and ip not in master:
        raise CheckFailed(
            f"main_process_ip is {ip} in {by.file}, which is not the master's"
            f" ({', '.join(sorted(name for name in master if name))})",
            "leave it out of the file, and the nodes meet at the first node's address",
        )


def on_cpu(by: Accelerate, nodes: Sequence[ProbedNode]) -> bool:
    """Tell whether accelerate has to be set to the CPU."""
    if by.keys.get("use_cpu") or by.kind in ("MULTI_CPU",):
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


def notes(by: Accelerate, machines: Machines, nodes: Sequence[ProbedNode], cpu: bool) -> list[str]:
    versions = {node.facts.accelerate for node in nodes}
    lines = [f"started by accelerate launch ({', '.join(sorted(versions))})"]
    if len(versions) > 1:
        versions_by_node = ", ".join(f"{node.name}: {node.facts.accelerate}" for node in nodes)
        lines.append(f"WARNING: nodes have different versions of accelerate ({versions_by_node})")
    if cpu and not by.keys.get("use_cpu"):
        lines.append("no GPU: accelerate is set to use the CPU (ACCELERATE_USE_CPU)")
    return lines + changed(by, machines)


def changed(by: Accelerate, machines: Machines) -> list[str]:
    """List the keys of the file that the nodes get with another value."""
    changes = []
    if by.kind == "MULTI_CPU":
        changes.append("distributed_type MULTI_CPU would need mpirun: torchrun starts the ranks")
    backend = by.keys.get("rdzv_backend") or "static"
    if backend != "static":
        changes.append(f"rdzv_backend {backend} would renumber the nodes: static keeps their order")
    if by.keys.get("same_network") is False and len(machines.counts) > 1:
        changes.append("same_network: false: all nodes meet at the master's address, as with true")
    ip = by.keys.get("main_process_ip")
    if ip not in (None, machines.ip):
        changes.append(f"main_process_ip {ip}: the nodes reach the master at {machines.ip}")
    port = by.number("main_process_port")
    if port and port != machines.port:
        changes.append(f"main_process_port {port}: the nodes meet at {machines.port}")
    speed = by.keys.get("deepspeed_config") or {}
    launcher = speed.get("deepspeed_multinode_launcher") or "standard"
    if by.kind == "DEEPSPEED" and launcher != "standard":
        changes.append(f"deepspeed_multinode_launcher {launcher} would start the nodes: standard")
    return changes


# -- one node -------------------------------------------------------------------------------------


def of_node(by: Accelerate, node: NodePlan, machines: Machines, cpu: bool) -> NodePlan:
    file = name_of(node.index)  # in the node's run directory, where its agent starts
    command = (node.python, "-u", "-m", PROGRAM, "--config_file", file)
    setting = EnvSetting("ACCELERATE_USE_CPU", "true", "no GPU, or use_cpu in accelerate's file")
    return replace(
        node,
        agent=command,
        placed=(
            ("port", "--main_process_port"),
        ),  # another one at a restart; the file has the rest
        paste=(*command, *node.program),
        settings=(*([setting] if cpu else []), *node.settings),
        files=((file, text(by, node.index, machines, cpu)),),
    )


def name_of(rank: int) -> str:
    """Return the file's name. Nodes may share a disk, so each has its own."""
    return f"accelerate_node{rank}.yaml"


def text(by: Accelerate, rank: int, machines: Machines, cpu: bool = False) -> str:
    """Write the file for one node: our keys are computed, the others are as they were."""
    import yaml

    kind = by.kind if by.kind in BY_TORCHRUN else "MULTI_GPU"
    keys = {
        **by.keys,
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "machine_rank": rank,
        "num_machines": len(machines.counts),
        "num_processes": machines.world,
        "main_process_ip": machines.ip,
        "main_process_port": machines.port,
        "rdzv_backend": "static",
        "same_network": True,
    }
    if cpu:
        keys["use_cpu"] = True
    if kind == "DEEPSPEED" and len(machines.counts) > 1:
        speed = by.keys.get("deepspeed_config") or {}
        keys["deepspeed_config"] = {**speed, "deepspeed_multinode_launcher": "standard"}
    if by.kind == "MULTI_CPU":
        keys.pop("mpirun_config", None)
    return str(yaml.safe_dump(keys))
