"""Who uses which GPU, in one table: jobs of ours, others, nobody, and what nobody can tell."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.commands.machines.nodes import (
    USERS,
    Used,
    cpu_rows,
    gpu_rows,
    users_json,
    users_text,
)
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen.output import PLAIN
from orchestrator.protocol.facts import Checkup, Gpu, Holder, Load, User
from orchestrator.views.top import table
from orchestrator.views.top.sample import NodeSample

NOW = 1_800_000_000.0
JOB = "train_20261122_063058-8387b4"


def gpu(index: int, **fields: Any) -> Gpu:
    fields = {"uuid": f"GPU-{index}", "memory": 80 << 30, "used": 1 << 20, "busy": 0, **fields}
    return Gpu("nvidia", index, "H100", **fields)


def used(name: str, **checkup: Any) -> Used:
    return Used(Node(name, line=1), 8, Checkup(**checkup))


BUSY = used(
    "gpu-one",
    gpus=(gpu(0, busy=97), gpu(1), gpu(2, used=40 << 30), gpu(3, problem="it is lost"), gpu(4)),
    holders=(
        Holder(71, "GPU-0", "python3", 60 << 30, "ada", JOB, NOW - 3700),
        Holder(72, "GPU-0", "jupyter", None, "bob", "", NOW - 10),
        Holder(73, "GPU-4", "python3", 20 << 30, "ada", JOB, NOW - 3700),
        Holder(74, "", "ollama", 1 << 30, "eve", "", None),
    ),
)
CPUS = used(
    "cpu-one",
    gpus=(),
    load=Load(
        3.04,
        (
            User("ada", JOB, 3.0, 2 << 30, 4, "python3", 9, NOW - 60),
            User("bob", "", 0.04, 1 << 20, 1, "vim", 10, NOW),
        ),
    ),
)
NONE = used("cpu-two", gpus=(), load=Load(0.0, ()))
LOST = Used(Node("gone", line=1), error=NodeError("it does not answer", "ping gone"))


def test_every_gpu_has_a_line_that_says_who_or_that_it_is_free() -> None:
    assert BUSY.checkup is not None
    rows = [USERS.words(use) for use in gpu_rows(BUSY, BUSY.checkup, NOW)]
    assert dict(zip(USERS.headings, rows[0], strict=True)) == {
        "NODE": "gpu-one",
        "GPU": "0: H100",
        "USER": "ada",
        "JOB OR PROGRAM": JOB,
        "SINCE": "1 h 01 min",
        "USE": "97 %",
        "MEMORY": "60 GiB",
    }
    assert rows[1:] == [
        ["gpu-one", "0: H100", "bob", "jupyter (72)", "10 s", "97 %", "-"],
        ["gpu-one", "1: H100", "free", "-", "-", "idle", "1 MiB of 80 GiB"],
        [
            "gpu-one", "2: H100", "?", "in another container, or hidden", "-",
            "idle", "40 GiB of 80 GiB",
        ],
        ["gpu-one", "3: H100", "sick", "it is lost", "-", "idle", "1 MiB of 80 GiB"],
        ["gpu-one", "4: H100", "ada", JOB, "1 h 01 min", "idle", "20 GiB"],
        ["gpu-one", "?", "eve", "ollama (74)", "-", "-", "1 GiB"],
    ]  # fmt: skip


def test_with_one_gpu_whoever_computes_is_on_it() -> None:
    holder = Holder(74, "", "python3", 1 << 30, "eve", "", NOW - 5)
    text = users_text([used("amd", gpus=(gpu(0, uuid=""),), holders=(holder,))], NOW, PLAIN)
    assert len(text.splitlines()) == 2 and "eve" in text


def test_machines_without_gpus_show_their_cores() -> None:
    text = users_text([CPUS, NONE], NOW, PLAIN)
    assert [line.split()[0] for line in text.splitlines()] == ["NODE", *["cpu-one"] * 2, "cpu-two"]
    assert f"ada   {JOB}" in text and "1 min 00 s  3.0 of 8 cores  2 GiB" in text
    assert "vim (10)" in text and "idle" in text
    assert "free" in text and "0 of 8 cores" in text


def test_who_cannot_be_asked_is_named_with_the_reason() -> None:
    partly = replace(NONE, checkup=Checkup(problems={"gpus": "nvidia-smi did not answer"}))
    text = users_text([LOST, partly], NOW, PLAIN)
    assert "unreachable" in text and "gone: it does not answer" in text
    assert "cpu-two: gpus: nvidia-smi did not answer" in text


def test_gpus_of_many_machines_that_are_used_alike_share_a_row() -> None:
    def machine(number: int, free: int) -> Used:
        holders = tuple(
            Holder(70 + at, f"GPU-{at}", "python3", (60 + at) << 30, "ada", JOB, NOW - 3700 - at)
            for at in range(8 - free)
        )
        gpus = tuple(gpu(at, busy=(90 + at) * (at < 8 - free)) for at in range(8))
        return used(f"gpu{number:03d}", gpus=gpus, holders=holders)

    machines = [machine(number, 4 if number == 9 else 0) for number in range(1, 65)]
    lines = [" ".join(line.split()) for line in users_text(machines, NOW, PLAIN).splitlines()]
    nodes = "gpu[001-008,010-064]"
    assert lines[1:] == [
        f"{nodes} [0-7]: H100 ada {JOB} 1 h 01 min 90 % to 97 % 60 GiB to 67 GiB",
        f"gpu009 [0-3]: H100 ada {JOB} 1 h 01 min 90 % to 93 % 60 GiB to 63 GiB",
        "gpu009 [4-7]: H100 free - - idle 1 MiB of 80 GiB",
    ]
    lost = [Used(Node(f"gone{number}", line=1), error=LOST.error) for number in range(40)]
    assert "gone[0-39]: it does not answer" in users_text(lost, NOW, PLAIN)


LATE = "it did not answer within 5 s"


HIDDEN = "in another container, or hidden"


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        ({"load": None}, ["none", "?", "-", "-", "? of 8 cores"]),
        ({"gpus": None, "load": None}, ["?", "?", "-", "-", "? of 8 cores"]),
        ({"gpus": None}, ["?", "?", "-", "-", "0.0 of 8 cores"]),
        ({"gpus": (gpu(0, busy=None, used=None),), "holders": None}, ["0: H100", "?", *"---"]),
        ({"gpus": (gpu(0, busy=None, used=None),)}, ["0: H100", "?", HIDDEN, "-", "-"]),
        ({"gpus": (gpu(0, busy=90, used=None),)}, ["0: H100", "?", HIDDEN, "-", "90 %"]),
        ({"gpus": (gpu(0, used=None),)}, ["0: H100", "free", "-", "-", "idle"]),
        ({"load": Load(6.0, (), unseen=5.8)}, ["none", "?", HIDDEN, "-", "5.8 of 8 cores"]),
        ({"load": Load(0.3, (), unseen=0.3)}, ["none", "free", "-", "-", "0 of 8 cores"]),
    ],
)
def test_what_nobody_could_measure_is_not_free(known: dict[str, Any], shown: list[str]) -> None:
    measured = {"gpus": (), "holders": (), "load": Load(0.0, ())}
    problems = {part: LATE for part in ("gpus", "load") if {**measured, **known}[part] is None}
    asked = used("one", **{**measured, **known}, problems=problems)
    assert asked.checkup is not None
    rows = gpu_rows(asked, asked.checkup, NOW) or cpu_rows(asked, asked.checkup, NOW)
    assert [USERS.words(row)[1:6] for row in rows] == [shown]
    node = NodeSample("one", asked.checkup)
    assert ("free" in table.NODES.words(node)[-1]) == ("free" in shown)


def test_json_tells_none_from_unknown() -> None:
    unknown = users_json(used("one", problems={"gpus": LATE}))
    assert unknown["gpus"] is None and unknown["load"] is None
    assert users_json(used("one", gpus=(gpu(0),)))["gpus"][0]["holders"] is None
    assert users_json(NONE)["gpus"] == []


def test_json_has_all_of_it() -> None:
    data = json.loads(json.dumps([users_json(each) for each in (BUSY, CPUS, LOST)]))
    first = data[0]["gpus"][0]
    assert [holder["user"] for holder in first["holders"]] == ["ada", "bob"]
    assert (first["index"], first["busy"], first["used"]) == (0, 97, 1 << 20)
    assert data[1]["load"]["users"][0]["job"] == JOB
    assert data[2] == {
        "name": "gone", "reached": False, "problem": "it does not answer", "fix": "ping gone",
    }  # fmt: skip
