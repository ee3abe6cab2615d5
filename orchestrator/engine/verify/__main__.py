"""Run, check and time collectives on every node, for `orchestrator verify`.

It runs as an ordinary job and writes its measurements to outputs/verify.json. The head, which has
no torch, explains the figures. By hand: torchrun ... -m orchestrator.engine.verify
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.common import files, text
from orchestrator.common.errors import OrchestratorError
from orchestrator.config.schema import Config
from orchestrator.engine.core import settings
from orchestrator.engine.observe import speed
from orchestrator.engine.ranks.ranks import Ranks, device_name
from orchestrator.engine.verify import collective_bench, pair_bench
from orchestrator.engine.verify.collective_bench import exchange_values, join_group
from orchestrator.protocol.timing import VERIFY_SECONDS

# The parts of --seconds for each measurement; the rest is for matmuls.
COLLECTIVES, PAIRS = 0.5, 0.35


def main() -> None:
    parser = argparse.ArgumentParser(description="Verify the links between these ranks.")
    parser.add_argument("--backend", choices=("nccl", "gloo"))
    parser.add_argument("--max-size", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    try:
        config = settings.config_of_launch() or Config()
        ranks = join_group(options.backend, VERIFY_SECONDS + options.seconds)
        wrong = verify_ranks(ranks, config, options.max_size, options.seconds)
    except OrchestratorError as error:
        raise SystemExit(str(error)) from None
    # This waits until rank 0 has written the report.
    exchange_values(None)
    if wrong:
        raise SystemExit(in_words(wrong))
    dist.destroy_process_group()


def verify_ranks(
    ranks: Ranks, config: Config, largest: int, seconds: float
) -> list[dict[str, Any]]:
    """Measure matmuls, collectives and pairs of nodes; return this rank's wrong results."""
    began = time.monotonic()
    report: dict[str, Any] = {"complete": False, **about_ranks(ranks)}
    kind = speed.matmul_dtype(config.training.mixed_precision)

    def multiply() -> None:
        """Measure a matmul and keep the best result so far, so that noise does not count."""
        now = exchange_values(speed.measured_matmul_flops(ranks.device, kind))
        report["flops"] = [max(two) for two in zip(now, report.get("flops", now), strict=True)]

    multiply()
    own: list[dict[str, Any]] = []
    if ranks.world > 1:
        results = collective_bench.measure_collectives(ranks, largest, COLLECTIVES * seconds)
        own = results.wrong
        report["wrong"] = [wrong for some in exchange_values(own) for wrong in some]
        report["collectives"] = results.rows
        report["notes"] = results.notes
        write_report(ranks, report)
        multiply()
        report["pairs"] = pair_bench.measure_pairs(ranks, PAIRS * seconds)
        write_report(ranks, report)
    multiply()
    report["seconds"] = time.monotonic() - began
    report["complete"] = True
    write_report(ranks, report)
    return own


def about_ranks(ranks: Ranks) -> dict[str, Any]:
    described = exchange_values((device_name(ranks.device), link_speed()))
    nodes = [
        {
            "index": node,
            "host": host,
            "ranks": ranks.of_node(node),
            "link_speed": described[ranks.of_node(node)[0]][1],
        }
        for node, host in sorted(set(ranks.nodes))
    ]
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    devices = [device for device, _ in described]
    return {"backend": backend, "torch": torch.__version__, "nodes": nodes, "devices": devices}


def link_speed() -> float | None:
    """Return the bytes per second that the network interface reports, or None if unknown."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        megabits = int(Path("/sys/class/net", name, "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


def in_words(wrong: list[dict[str, Any]]) -> str:
    first = wrong[0]
    size = text.format_bytes(first["bytes"], binary=True)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return (
        f"{first['collective']} of {size} gave rank {first['rank']} a wrong result: element"
        f" {first['element']} is {first['got']:g}, not {first['expected']:g}{more}"
    )


def write_report(ranks: Ranks, report: dict[str, Any]) -> None:
    """Replace the report file, so that partial results exist if the job fails later."""
    experiment = os.environ.get("ORCHESTRATOR_EXPERIMENT")
    if ranks.rank == 0 and experiment:
        path = Path(experiment, "outputs", "verify.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(path, json.dumps(report))


if __name__ == "__main__":
    main()
