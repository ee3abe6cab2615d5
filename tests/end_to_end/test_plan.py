"""`orchestrator plan` on two real hosts: its own, whose settings they are, cards in their /sys."""

import json

from tests.launching import Head

SHOW = """
import os
print("CARDS", os.environ.get("NCCL_IB_HCA"), os.environ.get("NCCL_IB_GID_INDEX"))
"""


def explain(head: Head, *words: str, code: int = 0, **env: str) -> str:
    command = head.command("orchestrator", "plan", "--explain", *words, **env).ends(code)
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


def test_plan_why_gives_reason_for_every_setting(head: Head) -> None:
    text = explain(head, head.script("show.py", SHOW))
    assert text.startswith("2 nodes, 2 ranks, fork start, master ")
    table = rows(text)
    (line,) = table["PYTORCH_NVML_BASED_CUDA_CHECK"]
    assert line.startswith("0-1 1 computed counting GPUs must not")
    first, second = table["NCCL_SOCKET_IFNAME"]
    assert first.startswith("0 =") and "computed the master's address is on it" in first
    assert second.startswith("1 =") and "computed it leads to the master" in second


def test_plan_without_why_is_dry_run(head: Head) -> None:
    name = head.script("show.py", SHOW)
    plan = head.command("orchestrator", "plan", "--json", "--nproc", "2", name, "a b").ends()
    found = json.loads(plan.text)
    assert (found["world_size"], found["transport"]) == (4, "ethernet")
    assert found["nodes"][1]["shell"].endswith("'a b'")

    why = {setting["name"]: setting["why"] for setting in found["nodes"][1]["settings"]}
    assert why["GLOO_SOCKET_IFNAME"] == "it leads to the master"
    plain = head.command("orchestrator", "plan", name).ends()
    assert plain.text.startswith("# 2 nodes, 2 ranks")


def test_plan_marks_settings_of_user(head: Head) -> None:
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
