import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.nodes.facts import Facts
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.machine import nvidia, probe
from orchestrator.node.machine.probe import gather_parts, resolve_target
from orchestrator.protocol.facts import Card, Leftover
from orchestrator.protocol.message import decode_value, encode_value
from orchestrator.protocol.requests.machine import Probe, Probed
from orchestrator.protocol.spec import Target
from tests.node.job.trees import plant

REQUEST = Probe(
    cwd="/",
    workdir=None,
    peers=("127.0.0.1", "127.0.0.2", "fe80::1"),
    target=Target(kind="engine", name=""),
)


def test_probe_returns_facts_for_plan() -> None:
    found = Probed(**probe.probe_machine(REQUEST), library="/lib")
    sent = decode_value(Probed, json.loads(json.dumps(encode_value(found))))
    facts = Facts(**vars(sent), clock_offset=0.25)
    assert facts.hostname == socket.gethostname()
    assert facts.python == sys.executable
    assert facts.cpus == len(os.sched_getaffinity(0))
    assert facts.memory_kb > 100_000
    assert facts.routes == {"127.0.0.1": ("lo", "127.0.0.1"), "fe80::1": ("", "")}
    assert ("127.0.0.1", 8) in {(one.address, one.prefix) for one in facts.addresses}
    assert (facts.workdir, facts.workdir_exists) == ("/", True)
    shown = json.loads(json.dumps(facts.to_json()))
    assert (shown["hostname"], shown["clock_offset"]) == (facts.hostname, 0.25)
    assert shown["target_kind"] == facts.target_kind and "target" not in shown


def test_environment_overrides_nccl_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, {"etc/nccl.conf": "NCCL_DEBUG=WARN"})
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MY_NCCL_THING", "1")
    own = probe.machine_settings(str(tmp_path))
    assert own["NCCL_DEBUG"] == "INFO" and "MY_NCCL_THING" not in own


# -- the program ------------------------------------------------------------------------------


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, text, mode in [
        ("train.py", "print(1)", 0o644),
        ("run.sh", "#!/bin/sh\n", 0o755),
        ("readable.sh", "#!/bin/sh\n", 0o644),
        ("shebang", "#!/usr/bin/env python3\n", 0o755),
        ("script", "import torch\n", 0o644),
        ("elf", "\x7fELF\x02", 0o755),
        ("odd.py", "\x7fELF", 0o755),
        ("empty", "", 0o644),
        ("package/__main__.py", "", 0o644),
        ("directory/other.py", "", 0o644),
        ("home/mine.py", "", 0o644),
        ("sleep", "print('the one here comes first')", 0o644),
    ]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "resolved"),
    [
        ("train.py", "script", "train.py"),
        ("./train.py", "script", "./train.py"),
        ("{here}/train.py", "script", "{here}/train.py"),
        ("shebang", "script", "shebang"),
        ("script", "script", "script"),
        ("empty", "script", "empty"),
        ("odd.py", "script", "odd.py"),
        ("package", "script", "package"),
        # Python treats a quoted ~ in this way.
        ("~/mine.py", "missing", "{here}/~/mine.py"),
        ("run.sh", "program", "./run.sh"),
        ("./run.sh", "program", "./run.sh"),
        ("elf", "program", "./elf"),
        ("readable.sh", "not executable", "{here}/readable.sh"),
        ("cat", "program", "cat"),
        ("sleep", "script", "sleep"),
        ("directory", "a directory", "{here}/directory"),
        ("none.py", "missing", "{here}/none.py"),
        ("/none.py", "missing", "/none.py"),
        ("no/cat", "missing", "{here}/no/cat"),
    ],
)
def test_resolve_target_finds_kind(workdir: Path, name: str, kind: str, resolved: str) -> None:
    target = Target(kind="auto", name=name.format(here=workdir))
    found = resolve_target(target, str(workdir))
    assert found == Target(kind=kind, name=resolved.format(here=workdir))


@pytest.mark.parametrize("kind", ["engine", "module"])
def test_resolve_target_keeps_module_and_engine(kind: str) -> None:
    target = Target(kind=kind, name="a.b")
    assert resolve_target(target, "/") == target


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_resolve_target_reports_unreadable_program(workdir: Path) -> None:
    (workdir / "train.py").chmod(0)
    found = resolve_target(Target(kind="auto", name="train.py"), str(workdir))
    assert found.kind == "unreadable"


def test_workdir_is_resolved(workdir: Path) -> None:
    for wanted, path, there in (
        (None, workdir, True),
        ("~", workdir / "home", True),
        ("~/none", workdir / "home/none", False),
        (str(workdir / "train.py"), workdir / "train.py", False),
    ):
        found = probe.probe_machine(REQUEST.replace(workdir=wanted, cwd=str(workdir)))
        assert (found["workdir"], found["workdir_exists"]) == (str(path), there)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    return tmp_path


def run(job: str, *events: str, spec: bool = True) -> RunDir:
    made = RunDir(job, 0)
    made.create()
    if spec:
        Path(made.spec).write_text("{}")
    fields = {
        "started": {"agent": 1, "supervisor": 2},
        "ended": {"agent": 0, "why": "", "ranks": {}, "killed": {}, "left": []},
    }
    lines = [json.dumps({"event": event, "time": 0.0, **fields[event]}) for event in events]
    Path(made.events).write_text("\n".join(lines))
    return made


def test_leftovers_are_empty_without_runs() -> None:
    assert probe.find_leftovers() == ()


def test_leftovers_lists_runs_that_have_not_ended() -> None:
    run("over-1", "started", "ended")
    # It never received a spec.
    run("never-1", spec=False)
    run("lost-1", "started")
    alive = run("alive-1", "started")
    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.bind(alive.socket)
        supervisor.listen()
        found = probe.find_leftovers()
    assert sorted(found, key=lambda leftover: leftover.job) == [
        Leftover(job="alive-1", alive=True),
        Leftover(job="lost-1", alive=False),
    ]


def fail() -> Any:
    raise OSError(5, "Input/output error")


def test_gather_returns_results_and_problems() -> None:
    found, problems = gather_parts(20.0, {"a": lambda: 1, "b": fail, "c": lambda: None})
    assert found == {"a": 1, "c": None}
    assert problems == {"b": "[Errno 5] Input/output error"}


def test_gather_returns_despite_hanging_part() -> None:
    for_ever = threading.Event()
    parts: dict[str, Any] = {"a": lambda: 1, "b": for_ever.wait, "c": lambda: 3, "d": for_ever.wait}
    try:
        found, problems = gather_parts(0.3, {**parts, "e": lambda: 5})
    finally:
        for_ever.set()
    assert found == {"a": 1, "c": 3, "e": 5}
    words = "it did not answer within 0.3 s"
    assert problems == {"b": words, "d": words}


def test_gather_raises_programming_errors() -> None:
    with pytest.raises(ZeroDivisionError):
        gather_parts(20.0, {"a": lambda: 1 / 0})


INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 301
GPU UUID: \t GPU-6c35a82c-6ee1-5a9b-1b5a-2f6f7ad4f9a1
Video BIOS: \t 96.00.74.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t 0000:1b:00.0
Device Minor: \t 0
GPU Firmware: \t 550.127.05
GPU Excluded:\t No"""


def test_gpu_count_counts_nvidia_devices(tmp_path: Path) -> None:
    names = ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"]
    plant(tmp_path, {f"dev/{name}": "" for name in names})
    assert probe.gpu_count(str(tmp_path)) == 3


def test_gpu_count_skips_amd_cpus(tmp_path: Path) -> None:
    nodes = {
        "0": "cpu_cores_count 64\nsimd_count 0\n",
        "1": "simd_count 304\n",
        "2": "simd_count 304",
    }
    top = "sys/class/kfd/kfd/topology/nodes"
    plant(tmp_path, {f"{top}/{node}/properties": text for node, text in nodes.items()})
    assert probe.gpu_count(str(tmp_path)) == 2


def test_gpu_count_is_zero_without_devices(tmp_path: Path) -> None:
    assert probe.gpu_count(str(tmp_path)) == 0
    assert nvidia.read_cards(str(tmp_path)) == []


def test_cards_are_read_from_driver_files(tmp_path: Path) -> None:
    top = "proc/driver/nvidia/gpus"
    unknown = "Model: \t\t Unknown\nGPU UUID: \t GPU-????????-????-????-????-????????????"
    plant(
        tmp_path,
        {
            f"{top}/0000:1b:00.0/information": INFORMATION,
            f"{top}/0000:43:00.0/information": unknown,
        },
    )
    first, second = nvidia.read_cards(str(tmp_path))
    assert first == Card(
        "nvidia", "NVIDIA H100 80GB HBM3", "GPU-6c35a82c-6ee1-5a9b-1b5a-2f6f7ad4f9a1",
        "0000:1b:00.0",
    )  # fmt: skip
    assert (second.model, second.uuid) == ("Unknown", "")
