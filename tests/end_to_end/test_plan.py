"""`orchestrator plan` on two real hosts: its own, whose settings they are, cards in their /sys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.netns import NetnsCluster
from tests.clusters.require import require_namespaces
from tests.launching import Head
from tests.node.job.trees import hca, roce

pytestmark = pytest.mark.cluster

SHOW = """
import os
print("CARDS", os.environ.get("NCCL_IB_HCA"), os.environ.get("NCCL_IB_GID_INDEX"))
"""


def explain(head: Head, *words: str, code: int = 0, **env: str) -> str:
    command = head.command("orchestrator", "plan", "--explain", *words, **env)
    assert command.finish() == code, command.text
    assert "Traceback" not in command.text
    assert not (head.directory / "experiments").exists()
    return command.text


def rows(text: str) -> dict[str, list[str]]:
    """setting -> its lines, each from the nodes on, with one space between words."""
    table = text.partition("SETTING")[2].partition("\n\n")[0].splitlines()[1:]
    found: dict[str, list[str]] = {}
    name = ""
    for line in table:
        words = line.split()
        name = words.pop(0) if line[0] != " " else name
        found.setdefault(name, []).append(" ".join(words))
    return found


def test_every_setting_has_its_reason(head: Head) -> None:
    text = explain(head, head.script("show.py", SHOW))
    assert text.startswith("2 nodes, 2 ranks, fork start, master ")
    table = rows(text)
    (line,) = table["PYTORCH_NVML_BASED_CUDA_CHECK"]
    assert line.startswith("0-1 1 computed counting GPUs must not")
    first, second = table["NCCL_SOCKET_IFNAME"]
    assert first.startswith("0 =") and "computed the master's address is on it" in first
    assert second.startswith("1 =") and "computed it leads to the master" in second


def test_without_why_it_is_the_dry_run(head: Head) -> None:
    name = head.script("show.py", SHOW)
    plan = head.command("orchestrator", "plan", "--json", "--nproc", "2", name, "a b")
    assert plan.finish() == 0, plan.text
    found = json.loads(plan.text)
    assert (found["world_size"], found["transport"]) == (4, "ethernet")
    assert found["nodes"][1]["shell"].endswith("'a b'")

    why = {setting["name"]: setting["why"] for setting in found["nodes"][1]["settings"]}
    assert why["GLOO_SOCKET_IFNAME"] == "it leads to the master"
    plain = head.command("orchestrator", "plan", name)
    assert plain.finish() == 0 and plain.text.startswith("# 2 nodes, 2 ranks")


def test_what_is_yours_is_shown_as_yours(head: Head) -> None:
    """ifname= in the list, the config, the hook, --env: each wins over what is before it."""
    first, second = head.cluster.addresses
    interface = rows(explain(head, head.script("show.py", SHOW)))["GLOO_SOCKET_IFNAME"][1].split()[
        1
    ]
    head.node_list = head.cluster.write_list([first, f"{second} ifname={interface}"], "own.txt")
    (head.directory / "c.yaml").write_text("nccl: {NCCL_DEBUG: WARN, NCCL_IB_TIMEOUT: 22}\n")
    (head.directory / "hook.sh").write_text(
        '[ "$NODE_RANK" = 1 ] && export NCCL_IB_TIMEOUT=23 NCCL_SOCKET_IFNAME=zz9\ntrue\n'
    )
    text = explain(
        head, "--config", "c.yaml", "--hook", "hook.sh", "--env", "NCCL_DEBUG=INFO",
        "--set", "nccl.GLOO_SOCKET_IFNAME=none0", "--env", "NCCL_TIMEOUT=1800", "show.py",
    )  # fmt: skip
    table = rows(text)
    assert table["NCCL_DEBUG"] == ["0-1 INFO yours --env; not WARN (yours, config nccl:)"]
    assert table["NCCL_IB_TIMEOUT"] == [
        "0 22 yours config nccl:",
        "1 23 yours the hook; not 22 (yours, config nccl:)",
    ]
    on_one = table["NCCL_SOCKET_IFNAME"][1]
    assert on_one == f"1 zz9 yours the hook; not ={interface} (yours, ifname= in the node list)"
    assert "config nccl:; not" in table["GLOO_SOCKET_IFNAME"][0]
    assert f"WARNING: NCCL_SOCKET_IFNAME=zz9 (the hook) fits no interface of {second}" in text
    assert f"WARNING: GLOO_SOCKET_IFNAME=none0 (config nccl:) fits no interface of {first}" in text
    assert "WARNING: nothing reads NCCL_TIMEOUT: set distributed.timeout" in text


# -- cards ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsCluster]:
    """Two hosts whose /sys/class has InfiniBand: the second's card 1 is down, its names differ."""
    require_namespaces()
    place = tmp_path_factory.mktemp("cards")
    with NetnsCluster(2, tmp_path_factory.mktemp("fabric"), nics=["eth0", "ens7"]) as cluster:
        for i in (0, 1):
            own = place / str(i)
            copied = cluster.popen(i, ["cp", "-a", "/sys/class", str(own)])
            assert copied.wait(timeout=60) in (0, 1)  # 1: one of its files has gone meanwhile
            first, second = ("mlx5_0", "mlx5_1") if i == 0 else ("ibp26s0", "ibp41s0")
            down = {"state": "1: DOWN", "physical": "3: Disabled"} if i else {}
            hca(own, first, top="infiniband")
            hca(own, second, top="infiniband", pci="0000:29:00.0", **down)
            roce(
                own, "mlx5_bond_0", f"10.5.0.{i + 1}", "eth0", top="infiniband", pci="0000:5e:00.0"
            )
            covered = cluster.popen(i, ["mount", "--bind", str(own), "/sys/class"])
            assert covered.wait(timeout=60) == 0
        yield cluster


def test_cards_are_chosen_per_node_and_reach_the_ranks(
    fabric: NetnsCluster, tmp_path: Path
) -> None:
    head = Head(fabric, tmp_path)
    text = explain(head, head.script("show.py", SHOW))
    assert "NCCL uses InfiniBand" in text.splitlines()[0]
    first, second = rows(text)["NCCL_IB_HCA"]
    assert first.startswith("0 =mlx5_0:1,mlx5_1:1 computed the 2 active ports for InfiniBand")
    assert "not mlx5_bond_0:1 (Ethernet)" in first
    assert second.startswith("1 =ibp26s0:1 computed the active port") and "(DOWN)" in second
    head.run("--no-torchrun", "show.py")
    assert b"CARDS =mlx5_0:1,mlx5_1:1 None" in head.log(0)
    assert b"CARDS =ibp26s0:1 None" in head.log(1)
    facts = manifest(head)["nodes"][1]["facts"]
    states = {port["device"]: port["state"] for port in facts["rdma"]}
    assert states == {"ibp26s0": "ACTIVE", "ibp41s0": "DOWN", "mlx5_bond_0": "ACTIVE"}
    assert {one["name"]: one["state"] for one in facts["interfaces"]}["ens7"] == "up"
    assert facts["limits"]["nofile"] and facts["disk"]["writable"] is True
    assert facts["problems"] == {}
    off = explain_fresh(fabric, tmp_path / "other", "--set", "nccl.profile=ethernet")
    assert rows(off)["NCCL_IB_DISABLE"] == ["0-1 1 computed nccl.profile is ethernet"]


def explain_fresh(cluster: NetnsCluster, directory: Path, *words: str) -> str:
    directory.mkdir()
    head = Head(cluster, directory)
    return explain(head, *words, head.script("show.py", SHOW))


def manifest(head: Head) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((head.experiment / "manifest.json").read_text())
    return found
