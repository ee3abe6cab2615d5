"""Compose and Kubernetes: their own schemas, and every argument byte for byte."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ruamel.yaml
import yaml
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.cli import main
from orchestrator.common.errors import OrchestratorError
from orchestrator.launchers import container
from tests.launchers.containers import composed, expanded

ODD = ["two words", "it's", 'say "hi"', "a\nb\tc", "$(touch x)", "$HOME ${HOME} $$ $", "`id`"]
ODD += ["", " ", "#no", "- x", "a: b", "0o17", "1_0", "yes", "~", "\\n", "*", "!!int", "é\u2028🙂"]
ODD += ["\x7f\x01\x85", "%d{{}}", "--", "-x"]
HERE = {"HOME": "of the shell", "x": "of the shell", "MASTER_PORT": "expanded"}


def generated(*words: str) -> str:
    result = CliRunner().invoke(main.cli, ["generate", *words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def compose(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(generated("compose", *words))
    return found


def kubernetes(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(generated("kubernetes", *words))
    return service, job


def pod(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


PAIR = ["--nnodes", "2", "--image", "registry/train:1"]
FULL = [*PAIR, "--gpus", "4", "--shm-size", "512m", "--name", "pair"]
CLAIM = ["--volume", "shared", "--retries", "1"]


# -- what they are --------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [PAIR, [*FULL, "--grace", "60", "train.py", *ODD]])
def test_the_schema_of_compose_holds(words: list[str]) -> None:
    schemas = importlib.resources.files("check_jsonschema.builtin_schemas.vendor")
    schema = json.loads((schemas / "compose-spec.json").read_text())
    jsonschema.validate(compose(*words), schema)


@pytest.mark.parametrize("words", [PAIR, [*FULL, *CLAIM, "train.py", *ODD]])
def test_the_schema_of_kubernetes_holds(words: list[str]) -> None:
    for document in kubernetes(*words):
        kubernetes_validate.validate(document, "1.32", strict=True)


def test_each_service_of_compose_has_its_part_and_gpus_of_its_own() -> None:
    services = compose(*FULL, "--master-port", "4000", "train.py")["services"]
    assert list(services) == ["node0", "node1"]
    for rank, service in enumerate(services.values()):
        assert service["environment"] == {
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "4000",
            "NNODES": "2",
            "NODE_RANK": str(rank),
            "NPROC_PER_NODE": "4",
        }
        assert service["shm_size"] == "512mb"
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(rank * 4 + gpu) for gpu in range(4)]
        assert service["networks"] == ["training"]
    assert services["node1"]["depends_on"] == {"node0": {"condition": "service_started"}}


def test_amds_gpus_are_asked_for_in_their_own_way() -> None:
    words = [*FULL, "--gpu-kind", "amd", "train.py"]
    for rank, service in enumerate(compose(*words)["services"].values()):
        assert service["devices"] == ["/dev/kfd", "/dev/dri"] and "deploy" not in service
        own = ",".join(str(rank * 4 + gpu) for gpu in range(4))
        assert service["environment"]["ROCR_VISIBLE_DEVICES"] == own
    schemas = importlib.resources.files("check_jsonschema.builtin_schemas.vendor")
    schema = json.loads((schemas / "compose-spec.json").read_text())
    jsonschema.validate(compose(*words), schema)
    limits = pod(kubernetes(*words)[1])["containers"][0]["resources"]["limits"]
    assert limits == {"amd.com/gpu": 4}


def test_a_pod_is_found_by_name_and_ends_for_good_only_by_itself() -> None:
    service, job = kubernetes(*FULL, *CLAIM, "train.py")
    spec = pod(job)
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"] == {"name": "pair"}
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    assert job["spec"]["backoffLimit"] == 2
    assert job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [1, 2, 3]
    assert (spec["subdomain"], spec["restartPolicy"]) == ("pair", "Never")
    env = {one["name"]: one["value"] for one in spec["containers"][0]["env"]}
    assert env["MASTER_ADDR"] == "pair-0.pair"
    assert "NODE_RANK" not in env, "JOB_COMPLETION_INDEX says it"
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}} in spec[
        "volumes"
    ]


def test_the_engine_resumes_and_a_script_is_left_alone() -> None:
    kept = [*PAIR, "--name", "mine", "--volume", "shared"]
    engine = pod(kubernetes(*kept)[1])["containers"][0]["command"]
    at = engine.index("--name")
    assert engine[at:][:4] == ["--name", "mine", "--set", "checkpoint.resume=auto"]
    script = pod(kubernetes(*kept, "train.py")[1])["containers"][0]["command"]
    assert script[-1] == "train.py" and "--set" not in script
    assert "--set" not in compose(*PAIR)["services"]["node0"]["entrypoint"], "it is not restarted"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
@example(ODD)
@settings(max_examples=10, deadline=None)
def test_every_argument_comes_back_from_yaml(words: list[str]) -> None:
    """Through YAML 1.1 and 1.2, and what each system puts in place of its variables."""
    escaped = [container.literal(word) for word in words]
    text = container.dumped({"command": escaped})
    for read in (yaml.safe_load, ruamel.yaml.YAML(typ="safe").load):
        found = read(text)["command"]
        assert [composed(word, HERE) for word in found] == words
        assert [expanded(word, HERE) for word in found] == words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compose", *PAIR, "--dry-run", "a.py"], "--dry-run does not apply here"),
        (["compose", *PAIR, "--detach"], "--detach does not apply here"),
        (
            ["compose", *PAIR, "--nodes-from", "slurm", "a.py"],
            "--nodes-from does not apply",
        ),
        (["compose", *PAIR, "--experiments", "x"], "--experiments is /experiments in the"),
        (["compose", *PAIR, "--shm-size", "lots"], "--shm-size lots: not a size"),
        (["compose", *PAIR, "--name", "My Run"], "'My Run' cannot name a Compose project"),
        (["compose", *PAIR, "--set", "training.max_step=3"], "did you mean 'max_steps'"),
        (["kubernetes", *PAIR, "--name", "my_run"], "'my_run' cannot name a Kubernetes Job"),
        (["kubernetes", *PAIR, "--name", "a" * 62], "cannot name a Kubernetes Job"),
        (["kubernetes", *PAIR, "--env", "HOME"], "--env HOME: a pod does not see"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(OrchestratorError) as refused:
        generated(*words)
    assert said in str(refused.value)


def test_what_the_shell_says_to_all_commands_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_SSH_CONFIG", "/home/me/ssh_config")
    assert compose(*PAIR, "a.py")["services"].keys() == {"node0", "node1"}
    with pytest.raises(OrchestratorError, match="--ssh-config does not apply here"):
        compose(*PAIR, "--ssh-config", "another", "a.py")


def test_compose_takes_a_secret_from_the_shell() -> None:
    services = compose(*PAIR, "--env", "NOT_SET_HERE", "--env", "A=b", "a.py")["services"]
    assert services["node0"]["environment"]["NOT_SET_HERE"] is None
    assert services["node0"]["entrypoint"][-3:] == ["--env", "A=b", "a.py"]
