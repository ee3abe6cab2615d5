"""The files of docs/containers.md: their own schemas hold, and run-node understands each part."""

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from orchestrator.cli.launch import launch_arguments
from orchestrator.launchers import run_node

PAGE = Path(__file__).parents[2] / "docs" / "containers.md"
COMPOSE, KUBERNETES = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def started(words: list[str], env: dict[str, str]) -> tuple[run_node.MachinePart, tuple[str, ...]]:
    """Return the part of the job that a container starts, and its program."""
    program, command, *rest = words
    assert (program, command) == ("orchestrator", "run-node")
    assert rest[:2] == ["--wait", "1800"]
    return run_node.read_part(env), launch_arguments(tuple(rest[2:])).program


def test_compose_services_form_one_job() -> None:
    document = yaml.safe_load(COMPOSE)
    schemas = importlib.resources.files("check_jsonschema.builtin_schemas.vendor")
    jsonschema.validate(document, json.loads((schemas / "compose-spec.json").read_text()))
    gpus: list[str] = []
    for rank, service in enumerate(document["services"].values()):
        part, program = started(service["entrypoint"], service["environment"])
        assert (part.rank, part.nnodes, part.master) == (rank, 2, "node0")
        assert program == ("train.py", "--lr", "1e-4")
        gpus += service["environment"]["NVIDIA_VISIBLE_DEVICES"].split(",")
    assert gpus == [str(number) for number in range(8)]


def test_kubernetes_pods_form_one_job() -> None:
    service, job = yaml.safe_load_all(KUBERNETES)
    for document in (service, job):
        kubernetes_validate.validate(document, "1.32", strict=True)
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    (node,) = pod["containers"]
    env = {one["name"]: one["value"] for one in node["env"]}
    part, program = started(node["command"], {**env, "JOB_COMPLETION_INDEX": "1"})
    assert (part.rank, part.nnodes, program) == (1, job["spec"]["completions"], ("train.py",))
    assert part.master == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert service["metadata"]["name"] == pod["subdomain"]
