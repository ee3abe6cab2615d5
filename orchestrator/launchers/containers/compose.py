"""A job as a Compose file: a service per node, on one machine."""

from __future__ import annotations

import re
from typing import Any

from orchestrator.common.errors import EXIT_DONE, UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.screen.output import tell
from orchestrator.launchers.containers import container
from orchestrator.launchers.containers.container import (
    EXPERIMENTS,
    ContainerCommand,
    ContainerOptions,
)

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
NETWORK = "training"


def generate(options: ContainerOptions, launch: LaunchArguments) -> int:
    tell(text(options, container.command_of(options, launch)))
    return EXIT_DONE


def text(options: ContainerOptions, command: ContainerCommand) -> str:
    if not NAME.fullmatch(command.name):
        raise UsageError(
            f"{command.name!r} cannot name a Compose project",
            "lower-case letters, digits, _ and -: --name my-run before the launch options",
        )
    document = {
        "name": command.name,
        "services": {host(rank): service(options, command, rank) for rank in range(options.nnodes)},
        "networks": {NETWORK: {}},
    }
    return (
        f"# {options.nnodes} nodes on this machine; save it as compose.yaml.\n"
        "#   docker compose up --abort-on-container-exit --exit-code-from node0\n"
        "# Ctrl-C asks the ranks to save and stop. What they write is in ./experiments.\n"
        + container.dumped(document)
    )


def host(rank: int) -> str:
    return f"node{rank}"


def service(options: ContainerOptions, command: ContainerCommand, rank: int) -> dict[str, Any]:
    number, unit = container.size(options.shm_size)
    own = {"MASTER_ADDR": host(0), "NODE_RANK": str(rank), **command.env}
    service: dict[str, Any] = {
        "image": container.literal(options.image),
        "hostname": host(rank),
        # Replaces the entrypoint of the image.
        "entrypoint": [container.literal(word) for word in command.argv],
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
            "start_period": f"{container.WAIT}s",  # all nodes have to be there first
        },
    }
    if rank:
        service["depends_on"] = {host(0): {"condition": "service_started"}}
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
