"""A job for Kubernetes: an Indexed Job, a pod per node, and the Service that gives them names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from orchestrator.common.errors import EXIT_CHECK, EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.screen.output import tell
from orchestrator.launchers import container
from orchestrator.launchers.container import (
    EXPERIMENTS,
    ContainerCommand,
    ContainerOptions,
)

LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LONGEST = 63  # of a pod's host name: <name>-<index>
CONTAINER = "node"
OURS = "orchestrator/job"


@dataclass(frozen=True)
class PodOptions(ContainerOptions):
    """The options of a container, and those that only Kubernetes has."""

    namespace: str | None = None
    volume: str | None = None  # a claim that all pods share
    retries: int = 3  # after a lost node


def generate(options: PodOptions, launch: LaunchArguments) -> int:
    command = container.command_of(options, launch, again=options.volume is not None)
    unset = [name for name, value in command.env.items() if value is None]
    if unset:
        raise UsageError(
            f"--env {unset[0]}: a pod does not see the variables that are set here",
            f"--env {unset[0]}=VALUE; or a secret: kubectl set env --local -f FILE"
            " --from=secret/NAME -o yaml",
        )
    tell(text(options, command))
    return EXIT_DONE


def text(options: PodOptions, command: ContainerCommand) -> str:
    name = command.name
    if not LABEL.fullmatch(name) or len(f"{name}-{options.nnodes - 1}") > LONGEST:
        raise UsageError(
            f"{name!r} cannot name a Kubernetes Job",
            f"lower-case letters, digits and -, at most {LONGEST} with the pod's number:"
            " --name my-run before the launch options",
        )
    if options.namespace and not NAMESPACE.fullmatch(options.namespace):
        raise UsageError(
            f"{options.namespace!r} cannot name a namespace", "lower-case letters, digits and -"
        )
    where = {"namespace": options.namespace} if options.namespace else {}
    space = f" -n {options.namespace}" if options.namespace else ""
    documents = (service(command, where), job(options, command, where))
    lines = [
        f"# {options.nnodes} nodes; save it as job.yaml.",
        "#   kubectl apply -f job.yaml",
        f"#   kubectl logs{space} -f -l {OURS}={name} --prefix --max-log-requests {options.nnodes}",
        "#   kubectl delete -f job.yaml     (the ranks save and stop first)",
        *(
            []
            if options.volume
            else ["# Without --volume all that it writes is lost with the pods."]
        ),
    ]
    return (
        "\n".join(lines) + "\n" + "---\n".join(container.dumped(document) for document in documents)
    )


def service(command: ContainerCommand, where: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": command.name, **where},
        "spec": {
            "clusterIP": "None",  # no balancing: a name for each pod
            "publishNotReadyAddresses": True,  # they meet before they are ready
            "selector": {OURS: command.name},
            "ports": [{"name": "master", "port": command.port}],
        },
    }


def job(options: PodOptions, command: ContainerCommand, where: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": command.name, **where},
        "spec": {
            "completionMode": "Indexed",  # JOB_COMPLETION_INDEX, and a name with it for each pod
            "completions": options.nnodes,
            "parallelism": options.nnodes,
            # When a node is lost, all pods end and are made again: each end counts.
            "backoffLimit": options.retries * options.nnodes,
            "podFailurePolicy": {"rules": rules()},
            "template": {
                "metadata": {"labels": {OURS: command.name}},
                "spec": pod(options, command),
            },
        },
    }


def rules() -> list[dict[str, Any]]:
    """Start again after a lost node, but not after a failed check or a failure of the program."""
    again = [{"type": "DisruptionTarget", "status": "True"}]
    codes = sorted((EXIT_FAILED, EXIT_USAGE, EXIT_CHECK))
    final = {"containerName": CONTAINER, "operator": "In", "values": codes}
    return [
        {"action": "Ignore", "onPodConditions": again},
        {"action": "FailJob", "onExitCodes": final},
    ]


def pod(options: PodOptions, command: ContainerCommand) -> dict[str, Any]:
    number, unit = container.size(options.shm_size)
    own = {"MASTER_ADDR": f"{command.name}-0.{command.name}", **command.env}
    node: dict[str, Any] = {
        "name": CONTAINER,
        "image": options.image,
        "command": [container.literal(word) for word in command.argv],
        "env": [{"name": key, "value": value} for key, value in own.items()],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    shm = {"medium": "Memory", "sizeLimit": f"{number}{unit.upper()}i"}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": shm}]
    if options.gpus:
        node["resources"] = {"limits": {f"{options.gpu_kind}.com/gpu": options.gpus}}
    kept: dict[str, Any] = {"emptyDir": {}}
    if options.volume:
        kept = {"persistentVolumeClaim": {"claimName": options.volume}}
    volumes.append({"name": "experiments", **kept})
    node["volumeMounts"].append({"name": "experiments", "mountPath": EXPERIMENTS})
    return {
        "restartPolicy": "Never",
        "subdomain": command.name,  # with the Service: <name>-0.<name> is the first pod
        "enableServiceLinks": False,  # a Service called "master" would set MASTER_PORT
        "terminationGracePeriodSeconds": command.stop_seconds,
        "containers": [node],
        "volumes": volumes,
    }
