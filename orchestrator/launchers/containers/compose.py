"""A job as a Compose file: a service per node, on one machine."""

from __future__ import annotations

import re
from typing import Any

from orchestrator.errors import EXIT_DONE, UsageError
from orchestrator.head.commands import jobs
from orchestrator.launchers.containers import container
from orchestrator.launchers.containers.container import EXPERIMENTS, Entry, Wish

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
NETWORK = "training"


def generate(options: dict[str, Any], launch: dict[str, Any]) -> int:
    wish = Wish(options["nnodes"], options["image"], options["gpus"], options["shm_size"])
    jobs.print_out(text(wish, container.entry(wish, options, launch)))
    return EXIT_DONE


def text(wish: Wish, entry: Entry) -> str:
    if not NAME.fullmatch(entry.name):
        raise UsageError(
            f"{entry.name!r} cannot name a Compose project",
            "small letters, digits, _ and -: --name my-run before the launch options",
        )
    document = {
        "name": entry.name,
        "services": {host(rank): service(wish, entry, rank) for rank in range(wish.nnodes)},
        "networks": {NETWORK: {}},
    }
    return (
        f"# {wish.nnodes} nodes on this machine; save it as compose.yaml.\n"
        "#   docker compose up --abort-on-container-exit --exit-code-from node0\n"
        "# Ctrl-C asks the ranks to save and stop. What they write is in ./experiments.\n"
        + container.dumped(document)
    )


def host(rank: int) -> str:
    return f"node{rank}"


def service(wish: Wish, entry: Entry, rank: int) -> dict[str, Any]:
    number, unit = container.size(wish.shm_size)
    own = {"MASTER_ADDR": host(0), "NODE_RANK": str(rank), **entry.env}
    found: dict[str, Any] = {
        "image": container.literal(wish.image),
        "hostname": host(rank),
        # In place of what the image would run first.
        "entrypoint": [container.literal(word) for word in entry.words],
        "init": True,  # process 1 that collects the ended
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
        "stop_grace_period": f"{entry.stop_seconds}s",
        "healthcheck": {
            "test": ["CMD", "orchestrator", "status", "--experiments", EXPERIMENTS],
            "interval": "30s",
            "timeout": "10s",
            "retries": 3,
            "start_period": f"{container.WAIT}s",  # all nodes have to be there first
        },
    }
    if rank:
        found["depends_on"] = {host(0): {"condition": "service_started"}}
    if wish.gpus:
        # By number: `count` would give every service the same first ones.
        ids = [str(rank * wish.gpus + gpu) for gpu in range(wish.gpus)]
        device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        found["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return found
