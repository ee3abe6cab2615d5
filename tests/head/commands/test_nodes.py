"""Contents of the table of machines, and its layout on a narrow screen."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.commands.machines.nodes import (
    MACHINES,
    Answer,
    lost_reasons,
    to_text,
    warm_text,
)
from orchestrator.head.follow import stop
from orchestrator.head.nodes import machine
from orchestrator.head.nodes.facts import Facts, ProbedNode
from orchestrator.head.nodes.machine import Machine
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen.output import PLAIN
from orchestrator.protocol.facts import Card, Checkup, Disk, Gpu
from orchestrator.protocol.requests.warm import StandbyEnds, StandbyState, StandbyStates
from orchestrator.views.top import command as top
from orchestrator.views.top.sample import NodeSample, TopSample
from tests.head.plan.probed import facts, infiniband, interface, software

H100 = "NVIDIA H100 80GB HBM3"
DISK = Disk("/job", 2 * 10**12, 10**12, 0, 0, "/", True)


def node(name: str, **fields: Any) -> Node:
    return Node(name, line=1, **fields)


def described(name: str, known: Facts, checkup: Checkup | None = None, **fields: Any) -> Machine:
    return machine.describe_machine(ProbedNode(node(name, **fields), known, name), checkup)


@pytest.fixture
def machines() -> list[Machine]:
    gpus = facts(
        *("eth0 10.0.0.1/24", "ib0 10.1.0.1/24", "lo2 fe80::1/64"),
        hostname="gpu-one",
        memory_kb=1 << 30,
        gpus=8,
        software=software(),
        disk=DISK,
        cards=(Card("nvidia", H100),) * 8,
        interfaces=(
            interface("eth0", speed=25000),
            interface("ib0", "infiniband"),
            interface("docker0", "bridge"),
        ),
        rdma=(infiniband("mlx5_0"), infiniband("mlx5_1", state="DOWN")),
    )
    gpu = Gpu(vendor="nvidia", index=0, model=H100, memory=80 << 30, driver="570.86.15")
    asked = Checkup(gpus=(gpu,) * 8)
    cpus = facts("eth0 10.0.0.2/24", hostname="cpu-two", torch="", disk=DISK)
    error = NodeError("it does not answer: no route to host", "ping 10.0.0.3")
    return [
        described("10.0.0.1", gpus, asked),
        described("10.0.0.2", cpus, spare=True),
        machine.lost_machine(node("10.0.0.3"), error),
    ]


@pytest.mark.cluster
def test_table_has_row_per_machine(machines: list[Machine]) -> None:
    one, two, three = (
        dict(zip(MACHINES.headings, MACHINES.words(each), strict=True)) for each in machines
    )
    assert one == {
        "NODE": "10.0.0.1",
        "HOST": "gpu-one",
        "CPUS": "8",
        "MEMORY": "1 TiB",
        "DISK FREE": "1 TB of 2 TB",
        "TORCH": "2.9.1+cu128",
        "GPUS": f"8 x {H100}, 80 GiB each",
        "DRIVER": "570.86.15",
        "NETWORK": "eth0 25 Gb/s, ib0 infiniband, mlx5_0:1 400 Gb/s InfiniBand",
    }
    assert two["NODE"] == "10.0.0.2 (spare)" and two["TORCH"] == two["GPUS"] == "none"
    assert list(three.values()) == ["10.0.0.3", "unreachable", *["-"] * 7]
    assert to_text(machines, PLAIN).splitlines()[-3:] == [
        "1 of 3 nodes cannot be reached",
        "  10.0.0.3: it does not answer: no route to host",
        "    -> ping 10.0.0.3",
    ]


@pytest.mark.cluster
def test_table_has_site_column_only_if_list_has_sites(machines: list[Machine]) -> None:
    assert "SITE" not in to_text(machines, PLAIN)
    lost = machine.lost_machine(node("10.0.0.4", site="hall2"), NodeError("gone", ""))
    sited = described("10.0.0.5", facts("eth0 10.0.0.5/24"), site="hall1")
    lines = to_text([*machines, lost, sited], PLAIN).splitlines()
    ends = [line.split()[-1] for line in lines[:6]]
    assert ends == ["SITE", "-", "-", "-", "hall2", "hall1"]
    assert [machine.machine_to_json(each)["site"] for each in (lost, sited)] == ["hall2", "hall1"]


@pytest.mark.cluster
def test_gpu_text_tells_slurm_allocation_from_hardware() -> None:
    known = facts(gpus=2, cards=(Card("nvidia", H100),) * 8)
    assert machine.gpu_text(described("a", known)) == f"2 of 8 x {H100}"
    assert machine.gpu_text(described("a", facts(gpus=2))) == "2 GPUs"


@pytest.mark.cluster
def test_json_round_trips_every_field(machines: list[Machine]) -> None:
    for each in machines:
        data = json.loads(json.dumps(machine.machine_to_json(each)))
        assert set(data) == set(Machine.__annotations__)
        assert machine.machine_from_json(data) == each


def test_every_table_shows_fix_for_refused_login() -> None:
    error, lost = NodeError("there is no key", "once: ssh-keygen"), node("gone")
    receipts = stop.receipts_of(["gone"], [error], 0.0, "")
    shown = NodeSample("gone", problem=error.what, fix=error.fix)
    for text in (
        lost_reasons([machine.lost_machine(lost, error)], 1),
        stop.receipts_to_text(receipts),
        stop.preview_stop(receipts, Path("/experiments")),
        top.to_text(TopSample(0.0, (shown,), ()), PLAIN),
        warm_text([(lost, error)], PLAIN),
    ):
        assert re.search(r"^ *gone: .*there is no key\n +-> once: ssh-keygen$", text, re.M), text


def test_warm_table_shows_standbys_and_nodes_without_one() -> None:
    state = StandbyState(
        since=1.0, seconds_left=120.0, ready=True, pid=7, memory=1 << 20, python="/p"
    )
    answers: list[tuple[Node, Answer]] = [
        (node("a"), StandbyStates(standbys=(state,))),
        (node("b"), StandbyStates(standbys=())),
        (node("c"), StandbyEnds(ended=(7,), left=(8,))),
    ]
    lines = [" ".join(line.split()) for line in warm_text(answers, PLAIN).splitlines()]
    assert lines == [
        "a warm 2 min 00 s left 1 MiB /p",
        "b cold",
        "c ended 7",
        "c processes 8 do not end (stuck in the kernel?)",
    ]
