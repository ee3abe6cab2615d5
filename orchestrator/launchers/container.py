"""The command that every container of a job runs, `orchestrator run-node`, and YAML for it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.common.errors import EXIT_CHECK, EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UsageError
from orchestrator.common.text import parse_size
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.plan.plan import DEFAULT_PORT
from orchestrator.head.screen.output import write_out
from orchestrator.head.start.request import resolve
from orchestrator.head.start.variables.user_env import matching

EXPERIMENTS = "/experiments"  # a volume in every container, which outlives them
WAIT_SECONDS = 1800  # for all nodes to be there: an image of many GB may have to come first
MARGIN_SECONDS = 30  # seconds beyond the ranks' grace before a container is killed
# The options of master_launch that make no sense in a container, and why.
NOT_HERE = {
    "detach": "does not apply here: a container ends with its program",
    "dry_run": "does not apply here: it runs where the containers do",
    "as_json": "does not apply here: it goes with --dry-run",
    "nodes_from": "does not apply here: each container starts its own part",
    "ssh_config": "does not apply here: containers are not reached by SSH",
    "experiments": f"is {EXPERIMENTS} in the containers",
}


@dataclass(frozen=True)
class ContainerOptions:
    """The number of containers, their image and their resources."""

    nnodes: int
    image: str
    gpus: int | None  # per node
    shm_size: str
    name: str | None  # of the whole; else that of the experiments
    arguments: tuple[str, ...]  # of run-node in each container
    gpu_kind: str = "nvidia"  # or amd
    volume: str | None = None  # Kubernetes: a claim that all pods share
    retries: int = 3  # Kubernetes: after a lost node


@dataclass(frozen=True)
class ContainerCommand:
    """The command of each container, and its environment except for its rank."""

    argv: tuple[str, ...]
    env: Mapping[str, str | None]  # None: the value is taken where the container is started
    port: int
    name: str
    stop_seconds: int


def command_of(asked: ContainerOptions, launch: LaunchArguments) -> ContainerCommand:
    """Write the command of every container; a wrong option is an error now."""
    launch.refuse(NOT_HERE)
    passed = [word for word in launch.env if "=" not in word]  # need not be set here
    assignments = tuple(word for word in launch.env if "=" in word)
    passed += [name for pattern in launch.env_pass for name in matching(pattern, os.environ)]
    passed += launch.secret
    request = resolve(replace(launch, env=assignments, env_pass=(), secret=()))
    chosen = request.config.launch
    command = [
        "orchestrator",
        "run-node",
        "--wait",
        str(WAIT_SECONDS),
        "--experiments",
        EXPERIMENTS,
    ]
    if request.config_file is not None and str(request.config_file) not in asked.arguments:
        command += ["--config", str(request.config_file)]  # from CONFIG_FILE, or the default
    name = asked.name or chosen.name
    if "name" not in launch.launch:
        command += ["--name", name]
    engine = request.target.kind == "engine"
    # On a volume, a pod that is started again finds what its last start has saved.
    if asked.volume and engine and request.config.checkpoint.resume == "never":
        command += ["--set", "checkpoint.resume=auto"]  # from experiments of this name alone
    env: dict[str, str | None] = {"MASTER_PORT": str(chosen.master_port or DEFAULT_PORT)}
    env["NNODES"] = str(asked.nnodes)
    nproc = chosen.nproc or asked.gpus
    if nproc:
        env["NPROC_PER_NODE"] = str(nproc)
    env.update(dict.fromkeys(passed))
    return ContainerCommand(
        argv=(*command, *asked.arguments),
        env=env,
        port=chosen.master_port or DEFAULT_PORT,
        name=name,
        stop_seconds=round(chosen.grace) + MARGIN_SECONDS,
    )


def size(shm_size: str) -> tuple[int, str]:
    """Return (8, "g") for 8g, 8G, 8gb or 8Gi; (512, "m") for 512m."""
    mebibytes = parse_size("--shm-size", shm_size) >> 20
    if not mebibytes:
        raise UsageError(f"--shm-size {shm_size}: less than 1 MiB", "write 8g, or 512m")
    return (mebibytes >> 10, "g") if mebibytes % 1024 == 0 else (mebibytes, "m")


def literal(text: str) -> str:
    """Escape $: Compose and Kubernetes replace $NAME, ${NAME} and $(NAME), and read $$ as $."""
    return text.replace("$", "$$")


def dumped(document: Mapping[str, Any]) -> str:
    """Return YAML with every text quoted: other readers take some unquoted texts for numbers."""
    import yaml

    class Quoted(yaml.SafeDumper):
        pass

    tag = "tag:yaml.org,2002:str"
    Quoted.add_representer(str, lambda dumper, text: dumper.represent_scalar(tag, text, style='"'))
    return str(
        yaml.dump(document, Dumper=Quoted, sort_keys=False, width=float("inf"), allow_unicode=True)
    )


# -- compose ------------------------------------------------------------------------------------
# A job as a Compose file: a service per node, on one machine.

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
NETWORK = "training"


def generate_compose(options: ContainerOptions, launch: LaunchArguments) -> int:
    command = command_of(options, launch)
    if not NAME.fullmatch(command.name):
        raise UsageError(
            f"{command.name!r} cannot name a Compose project",
            "lower-case letters, digits, _ and -: --name my-run before the launch options",
        )
    document = {
        "name": command.name,
        "services": {
            f"node{rank}": compose_service(options, command, rank) for rank in range(options.nnodes)
        },
        "networks": {NETWORK: {}},
    }
    write_out(
        f"# {options.nnodes} nodes on this machine; save it as compose.yaml.\n"
        "#   docker compose up --abort-on-container-exit --exit-code-from node0\n"
        "# Ctrl-C asks the ranks to save and stop. What they write is in ./experiments.\n"
        + dumped(document)
    )
    return EXIT_DONE


def compose_service(
    options: ContainerOptions, command: ContainerCommand, rank: int
) -> dict[str, Any]:
    number, unit = size(options.shm_size)
    own = {"MASTER_ADDR": "node0", "NODE_RANK": str(rank), **command.env}
    service: dict[str, Any] = {
        "image": literal(options.image),
        "hostname": f"node{rank}",
        # Replaces the entrypoint of the image.
        "entrypoint": [literal(word) for word in command.argv],
        "init": True,  # a process 1 that reaps ended processes
        "environment": own,
        "networks": [NETWORK],
        "volumes": [
            {
                "type": "bind",
                "source": "./experiments",
                "target": EXPERIMENTS,
                "bind": {"create_host_path": True},
            }
        ],
        "shm_size": f"{number}{unit}b",  # NCCL and data loaders; Docker gives 64 MB
        "ulimits": {"memlock": -1, "stack": 64 << 20},
        "stop_grace_period": f"{command.stop_seconds}s",
        "healthcheck": {
            "test": ["CMD", "orchestrator", "status", "--experiments", EXPERIMENTS],
            "interval": "30s",
            "timeout": "10s",
            "retries": 3,
            "start_period": f"{WAIT_SECONDS}s",  # all nodes have to be there first
        },
    }
    if rank:
        service["depends_on"] = {"node0": {"condition": "service_started"}}
    if options.gpus:
        # By number: `count` would give every service the same first ones.
        ids = [str(rank * options.gpus + gpu) for gpu in range(options.gpus)]
        if options.gpu_kind == "amd":
            service["devices"] = ["/dev/kfd", "/dev/dri"]  # of all GPUs: ROCm picks by number
            service["group_add"] = ["video"]
            service["environment"] = {**own, "ROCR_VISIBLE_DEVICES": ",".join(ids)}
            return service
        device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


# -- kubernetes ------------------------------------------------------------------------------------
# An Indexed Job, a pod per node, and the Service that gives them names.

LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
LONGEST = 63  # of a pod's host name: <name>-<index>
CONTAINER = "node"
OURS = "orchestrator/job"


def generate_kubernetes(options: ContainerOptions, launch: LaunchArguments) -> int:
    command = command_of(options, launch)
    unset = [name for name, value in command.env.items() if value is None]
    if unset:
        raise UsageError(
            f"--env {unset[0]}: a pod does not see the variables that are set here",
            f"--env {unset[0]}=VALUE; or a secret: kubectl set env --local -f FILE"
            " --from=secret/NAME -o yaml",
        )
    name = command.name
    if not LABEL.fullmatch(name) or len(f"{name}-{options.nnodes - 1}") > LONGEST:
        raise UsageError(
            f"{name!r} cannot name a Kubernetes Job",
            f"lower-case letters, digits and -, at most {LONGEST} with the pod's number:"
            " --name my-run before the launch options",
        )
    lines = [
        f"# {options.nnodes} nodes; save it as job.yaml.",
        "#   kubectl apply -f job.yaml",
        f"#   kubectl logs -f -l {OURS}={name} --prefix --max-log-requests {options.nnodes}",
        "#   kubectl delete -f job.yaml     (the ranks save and stop first)",
        *(
            []
            if options.volume
            else ["# Without --volume all that it writes is lost with the pods."]
        ),
    ]
    documents = map(dumped, (pod_names(command), job(options, command)))
    write_out("\n".join(lines) + "\n" + "---\n".join(documents))
    return EXIT_DONE


def pod_names(command: ContainerCommand) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": command.name},
        "spec": {
            "clusterIP": "None",  # no balancing: a name for each pod
            "publishNotReadyAddresses": True,  # they meet before they are ready
            "selector": {OURS: command.name},
            "ports": [{"name": "master", "port": command.port}],
        },
    }


def job(options: ContainerOptions, command: ContainerCommand) -> dict[str, Any]:
    """Return a Job that begins again after a lost node, not after a failure of check or program."""
    lost = [{"type": "DisruptionTarget", "status": "True"}]
    codes = sorted((EXIT_FAILED, EXIT_USAGE, EXIT_CHECK))
    final = {"containerName": CONTAINER, "operator": "In", "values": codes}
    rules = [
        {"action": "Ignore", "onPodConditions": lost},
        {"action": "FailJob", "onExitCodes": final},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": command.name},
        "spec": {
            "completionMode": "Indexed",  # JOB_COMPLETION_INDEX, and a name with it for each pod
            "completions": options.nnodes,
            "parallelism": options.nnodes,
            # When a node is lost, all pods end and are made again: each end counts.
            "backoffLimit": options.retries * options.nnodes,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": {OURS: command.name}},
                "spec": pod(options, command),
            },
        },
    }


def pod(options: ContainerOptions, command: ContainerCommand) -> dict[str, Any]:
    number, unit = size(options.shm_size)
    own = {"MASTER_ADDR": f"{command.name}-0.{command.name}", **command.env}
    node: dict[str, Any] = {
        "name": CONTAINER,
        "image": options.image,
        "command": [literal(word) for word in command.argv],
        "env": [{"name": key, "value": value} for key, value in own.items()],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    shm = {"medium": "Memory", "sizeLimit": f"{number}{unit.upper()}i"}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": shm}]
    if options.gpus:
        node["resources"] = {"limits": {f"{options.gpu_kind}.com/gpu": options.gpus}}
    kept: dict[str, Any] = {"emptyDir": {}}
    if options.volume:
        kept = {"persistentVolumeClaim": {"claimName": options.volume}}
    volumes.append({"name": "experiments", **kept})
    node["volumeMounts"].append({"name": "experiments", "mountPath": EXPERIMENTS})
    return {
        "restartPolicy": "Never",
        "subdomain": command.name,  # with the Service: <name>-0.<name> is the first pod
        "enableServiceLinks": False,  # a Service called "master" would set MASTER_PORT
        "terminationGracePeriodSeconds": command.stop_seconds,
        "containers": [node],
        "volumes": volumes,
    }
