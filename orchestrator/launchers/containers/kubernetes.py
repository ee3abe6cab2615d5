"""A job for Kubernetes: an Indexed Job, a pod per node, and the Service that gives them names."""

from __future__ import annotations

import re
from typing import Any

from orchestrator.errors import EXIT_CHECK, EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UsageError
from orchestrator.head.commands import jobs
from orchestrator.launchers.containers import container
from orchestrator.launchers.containers.container import EXPERIMENTS, Entry, Wish

LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
LONGEST = 63  # of a pod's host name: <name>-<index>
CONTAINER = "node"
OURS = "orchestrator/job"


def generate(options: dict[str, Any], launch: dict[str, Any]) -> int:
    wish = Wish(options["nnodes"], options["image"], options["gpus"], options["shm_size"])
    entry = container.entry(wish, options, launch, again=options["volume"] is not None)
    unset = [name for name, value in entry.env.items() if value is None]
    if unset:
        raise UsageError(
            f"--env {unset[0]}: a pod does not have what is set here",
            f"--env {unset[0]}=VALUE; or a secret: kubectl set env --local -f FILE"
            " --from=secret/NAME -o yaml",
        )
    jobs.print_out(text(wish, entry, options))
    return EXIT_DONE


def text(wish: Wish, entry: Entry, options: dict[str, Any]) -> str:
    name = entry.name
    if not LABEL.fullmatch(name) or len(f"{name}-{wish.nnodes - 1}") > LONGEST:
        raise UsageError(
            f"{name!r} cannot name a Job of Kubernetes",
            f"small letters, digits and -, the first a letter, with its number at most {LONGEST}:"
            " --name my-run before the launch options",
        )
    where = {"namespace": options["namespace"]} if options["namespace"] else {}
    space = f" -n {options['namespace']}" if options["namespace"] else ""
    documents = (service(entry, where), job(wish, entry, where, options))
    lines = [
        f"# {wish.nnodes} nodes; save it as job.yaml.",
        "#   kubectl apply -f job.yaml",
        f"#   kubectl logs{space} -f -l {OURS}={name} --prefix --max-log-requests {wish.nnodes}",
        "#   kubectl delete -f job.yaml     (the ranks save and stop first)",
        *(
            []
            if options["volume"]
            else ["# Without --volume all that it writes goes with the pods."]
        ),
    ]
    return "\n".join(lines) + "\n" + "---\n".join(container.dumped(one) for one in documents)


def service(entry: Entry, where: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": entry.name, **where},
        "spec": {
            "clusterIP": "None",  # no balancing: a name for each pod
            "publishNotReadyAddresses": True,  # they meet before they are ready
            "selector": {OURS: entry.name},
            "ports": [{"name": "master", "port": entry.port}],
        },
    }


def job(wish: Wish, entry: Entry, where: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": entry.name, **where},
        "spec": {
            "completionMode": "Indexed",  # JOB_COMPLETION_INDEX, and a name with it for each pod
            "completions": wish.nnodes,
            "parallelism": wish.nnodes,
            # When a node is lost, all pods end and are made again: each end counts.
            "backoffLimit": options["retries"] * wish.nnodes,
            "podFailurePolicy": {"rules": rules()},
            "template": {
                "metadata": {"labels": {OURS: entry.name}},
                "spec": pod(wish, entry, options),
            },
        },
    }


def rules() -> list[dict[str, Any]]:
    """A failed check, or a failure of the program, would be the same again; a lost node is not."""
    again = [{"type": "DisruptionTarget", "status": "True"}]
    codes = sorted((EXIT_FAILED, EXIT_USAGE, EXIT_CHECK))
    final = {"containerName": CONTAINER, "operator": "In", "values": codes}
    return [
        {"action": "Ignore", "onPodConditions": again},
        {"action": "FailJob", "onExitCodes": final},
    ]


def pod(wish: Wish, entry: Entry, options: dict[str, Any]) -> dict[str, Any]:
    number, unit = container.size(wish.shm_size)
    own = {"MASTER_ADDR": f"{entry.name}-0.{entry.name}", **entry.env}
    node: dict[str, Any] = {
        "name": CONTAINER,
        "image": wish.image,
        "command": [container.literal(word) for word in entry.words],
        "env": [{"name": key, "value": value} for key, value in own.items()],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    shm = {"medium": "Memory", "sizeLimit": f"{number}{unit.upper()}i"}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": shm}]
    if wish.gpus:
        node["resources"] = {"limits": {"nvidia.com/gpu": wish.gpus}}
    kept: dict[str, Any] = {"emptyDir": {}}
    if options["volume"]:
        kept = {"persistentVolumeClaim": {"claimName": options["volume"]}}
    volumes.append({"name": "experiments", **kept})
    node["volumeMounts"].append({"name": "experiments", "mountPath": EXPERIMENTS})
    return {
        "restartPolicy": "Never",
        "subdomain": entry.name,  # with the Service: <name>-0.<name> is the first pod
        "enableServiceLinks": False,  # a Service called "master" would set MASTER_PORT
        "terminationGracePeriodSeconds": entry.stop_seconds,
        "containers": [node],
        "volumes": volumes,
    }
