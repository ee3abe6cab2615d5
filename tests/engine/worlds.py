"""Runs the engine's ranks as torchrun would, but from one Python that has imported torch once.

`python -m tests.engine.worlds DIRECTORY CONFIG RANKS_PER_NODE...` with ranks such as 2,2: for each,
one job whose metrics and output are under DIRECTORY/RANKS. Prints the exit codes of all its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # the optimizer would import it in every rank, 0.4 s each
import torch.distributed.fsdp  # noqa: F401

from orchestrator.engine import train


def job(directory: Path, config: dict[str, Any], nodes: list[int], stop: bool) -> list[int]:
    world = sum(nodes)
    training = {**config["training"], "batch_size": config["training"]["batch_size"] // world}
    directory.mkdir()
    spec = {"config": {**config, "training": training}}
    (directory / "spec.json").write_text(json.dumps(spec))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "ORCHESTRATOR_RUN": str(directory),
        "ORCHESTRATOR_EXPERIMENT": str(directory),
        "WORLD_SIZE": str(world),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    pids: list[int] = []
    for local_world in nodes:
        for local in range(local_world):
            own = {
                "RANK": str(len(pids)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(local_world),
            }
            pid = os.fork()
            if pid == 0:
                rank(directory / f"out_{len(pids)}", {**shared, **own})
            pids.append(pid)
    if stop:
        metrics = directory / "outputs" / "rank_00_metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            time.sleep(0.02)
        os.kill(pids[-1], signal.SIGTERM)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def rank(output: Path, env: dict[str, str]) -> NoReturn:
    os.environ.update(env)
    fd = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    code = 1
    try:
        train.main()
        code = 0
    except Exception as error:  # noqa: BLE001 (told to the test)
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


if __name__ == "__main__":
    root, text, *worlds = sys.argv[1:]
    sys.argv[1:] = []
    for words in worlds:
        ranks, _, name = words.partition(":")
        config = json.loads(text)
        if name == "full":
            config["fsdp"] = {"sharding_strategy": "full_shard"}
        counts = [int(count) for count in ranks.split(",")]
        codes = job(Path(root, words), config, counts, name == "stop")
        print(words, *codes, flush=True)
