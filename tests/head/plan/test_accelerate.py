"""accelerate's file against the nodes: what is computed, what is handed on, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.common.errors import CheckFailed, OrchestratorError, UsageError
from orchestrator.config.launch import Launch, Where
from orchestrator.config.schema import Config
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan import accelerate, dry_run, plan
from orchestrator.head.plan.accelerate import Accelerate
from orchestrator.head.plan.model import Plan
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.protocol.spec import Target
from tests.head.plan.probed import facts as machine

SEED = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "machine_rank": 1,
    "num_machines": 2,
    "num_processes": 8,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29500,
    "rdzv_backend": "c10d",
    "mixed_precision": "fp16",
    "same_network": True,
}


def planned(
    keys: dict[str, Any], *, gpus: tuple[int, ...] = (4, 4), nproc: int | None = None, **facts: Any
) -> Plan:
    by = Accelerate("a.yaml", keys)
    known = {"accelerate": "1.15.0", **facts}
    found = []
    for i, count in enumerate(gpus):
        name = f"10.0.0.{i + 1}"
        seen = machine(f"eth0 {name}/24", gpus=count, port=29500, **known)
        found.append(ProbedNode(Node(name), seen, name))
    settled = Config(launch=accelerate.settle_launch(Launch(nproc=nproc), by))
    config = accelerate.count_ranks(settled, by, found, len(found))
    target = Target("auto", "train.py", ("--lr", "1e-4"))
    made = plan.plan_job(LaunchRequest(Where(), config, target, (), ()), found, "job", "/e")
    return accelerate.plan_accelerate(made, by, found)


def files(made: Plan) -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for node in made.nodes for _, text in node.files]


def test_config_file_serves_all_nodes() -> None:
    speed = {"zero_stage": 2}
    made = planned({**SEED, "fsdp_config": {"fsdp_version": 2}, "deepspeed_config": speed})
    for rank, keys in enumerate(files(made)):
        assert keys == {
            **SEED,
            "machine_rank": rank,
            "rdzv_backend": "static",
            "fsdp_config": {"fsdp_version": 2},
            "deepspeed_config": speed,
        }
    node = made.nodes[1]
    assert node.agent[1:] == (
        "-u",
        "-m",
        accelerate.PROGRAM,
        "--config_file",
        "accelerate_node1.yaml",
    )
    assert node.placed == (("port", "--main_process_port"),)
    assert node.paste[-3:] == ("/job/train.py", "--lr", "1e-4")
    assert made.start == "plain"
    shell = "\n".join(dry_run.shell_lines(made, node))
    assert "cat > accelerate_node1.yaml <<'END'\ncompute_environment: LOCAL_MACHINE\n" in shell


def test_planned_address_overrides_file() -> None:
    made = planned({**SEED, "main_process_ip": "192.168.1.100"})
    assert {keys["main_process_ip"] for keys in files(made)} == {"10.0.0.1"}
    assert "main_process_ip 192.168.1.100: the nodes reach the master at 10.0.0.1" in made.notes


def test_config_is_computed_without_file() -> None:
    (first, second) = files(planned({}))
    assert (first["num_machines"], first["num_processes"]) == (2, 8)
    assert (first["machine_rank"], second["machine_rank"]) == (0, 1)


def test_file_gives_rank_count_without_gpus() -> None:
    made = planned({**SEED, "num_processes": 6}, gpus=(0, 0))
    assert [node.nproc for node in made.nodes] == [3, 3]
    assert made.nodes[0].env["ACCELERATE_USE_CPU"] == "true"
    assert any("set to use the CPU" in note for note in made.notes)


def test_use_cpu_is_not_set_for_gpus() -> None:
    assert "ACCELERATE_USE_CPU" not in planned(SEED).nodes[0].env
    other = planned({**SEED, "distributed_type": "MULTI_XPU", "num_processes": 2}, gpus=(0, 0))
    assert "ACCELERATE_USE_CPU" not in other.nodes[0].env


def test_foreign_launchers_of_file_are_removed() -> None:
    made = planned({**SEED, "distributed_type": "DEEPSPEED"})
    assert files(made)[0]["deepspeed_config"] == {"deepspeed_multinode_launcher": "standard"}
    made = planned({**SEED, "distributed_type": "MULTI_CPU", "mpirun_config": {"x": 1}})
    assert files(made)[0]["distributed_type"] == "MULTI_GPU"
    assert "mpirun_config" not in files(made)[0]
    assert made.nodes[0].env["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"num_processes": 4}, {}, "num_processes is 4 in a.yaml, but these 2 nodes run 8 ranks"),
        ({"num_machines": 3}, {}, "num_machines is 3 in a.yaml, but the job has 2 nodes"),
        ({"distributed_type": "NO"}, {}, "8 ranks would each be alone"),
        ({}, {"accelerate": ""}, "there is no accelerate on 10.0.0.1"),
        ({"num_processes": None}, {"gpus": (4, 2)}, "as many processes on one machine as on the"),
        ({"num_processes": 4}, {"gpus": (4, 0), "nproc": 2}, "no GPU was found on 10.0.0.2"),
    ],
)
def test_config_that_does_not_fit_nodes_is_refused(
    change: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckFailed) as refused:
        planned({**SEED, **change}, **options)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "must hold keys"),
        ("a: [", "cannot be read: while parsing"),
        ("distributed_type: XLA", "'XLA' in"),
        ("num_machines: two", "num_machines is 'two'"),
        ("main_process_port: yes", "main_process_port is True"),
    ],
)
def test_invalid_config_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError) as refused:
        accelerate.read_file(tmp_path / "a.yaml")
    assert words in str(refused.value)


def test_asked_returns_accelerate_only_for_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("num_processes: -1")
    assert accelerate.asked_options(None, None, "auto") is None
    assert accelerate.asked_options("accelerate", None, "auto") == Accelerate()
    found = accelerate.asked_options("slurm", tmp_path / "a.yaml", "module")
    assert found is not None and found.number("num_processes") is None
    with pytest.raises(OrchestratorError, match="the built-in engine does not"):
        accelerate.asked_options("accelerate", None, "engine")
