"""Checks of what runs on the nodes: Python, torch, NCCL, drivers, the code itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from orchestrator.common.hosts import listed
from orchestrator.common.text import plural
from orchestrator.head.doctor.findings import BAD, UNKNOWN, WARN, Case, Finding, odd_values, unequal
from orchestrator.head.nodes.facts import by_value, how_to_get_torch, release

OLDEST_TORCH = (2, 8)  # that the engine can shard with


def reach(case: Case) -> Iterator[Finding]:
    for node in case.nodes:
        if node.error:
            yield Finding(node.ask, BAD, (node.name,), f"{node.name}: {node.error}", node.fix)


def cordon(case: Case) -> Iterator[Finding]:
    for node in case.nodes:
        if node.cordoned:
            what = f"{node.name} is cordoned ({node.cordoned}): launches skip it"
            fix = f"orchestrator nodes --uncordon {node.name}"
            yield Finding("cordon", WARN, (node.name,), what, fix)


def python(case: Case) -> Iterator[Finding]:
    versions = [(node.name, minor(facts.python_version)) for node, facts in case.seen]
    fix = "python=/path/to/python{most} after these nodes in the list"
    yield from unequal("python", WARN, "Python", versions, fix)


def torch(case: Case) -> Iterator[Finding]:
    """Compare releases, whose wire formats differ; another build of the same one mostly works."""
    if not case.needs.torch:
        return
    there = [(node.name, facts.torch) for node, facts in case.seen if facts.torch]
    lacking = {node.name: facts for node, facts in case.seen if not facts.torch}
    if lacking:
        of_python = by_value((name, facts.python) for name, facts in lacking.items())
        what = "; ".join(f"{listed(who)}: {path} has no torch" for path, who in of_python.items())
        most, _ = odd_values([(name, without_build(version)) for name, version in there])
        fix = how_to_get_torch(lacking, most or "")
        yield Finding("torch", BAD, tuple(lacking), what, fix)
    yield from too_old(case, there)
    releases = [(name, without_build(version)) for name, version in there]
    _, others = odd_values(releases)
    fix = "on these nodes: python -m pip install torch=={most}"
    yield from unequal("torch", BAD, "torch", releases, fix)
    wrong = list(built_for_cpus(case))
    yield from wrong
    odd = {name for who in others.values() for name in who} | {f.nodes[0] for f in wrong}
    builds = [(name, version) for name, version in there if name not in odd]
    yield from unequal("torch", WARN, "builds of torch", builds)
    yield from imports(case)


def built_for_cpus(case: Case) -> Iterator[Finding]:
    """The ranks would train on the CPUs without a word, or each by itself."""
    for node, facts in case.seen:
        built = facts.software
        for_cpus = facts.torch.endswith("+cpu") or not (built.cuda or built.hip)
        if facts.torch and facts.gpus and for_cpus and facts.target_kind != "program":
            gpus = plural(facts.gpus, "GPU")
            what = f"{node.name} has {gpus}, and its torch {facts.torch} is built for CPUs"
            fix = (
                f"on {node.name}: {facts.python} -m pip install --force-reinstall"
                f" torch=={without_build(facts.torch)}, from the index for its driver"
                " (https://pytorch.org/get-started/locally); or name a Python that has it"
            )
            yield Finding("torch", BAD, (node.name,), what, fix)


def too_old(case: Case, there: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """The engine would say so only once all ranks have imported torch."""
    for name, version in there if case.needs.engine else ():
        if (release(version) or (0, 0)) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            what = f"{name}: the engine needs torch {oldest}, here is {version}"
            fix = f"on {name}: python -m pip install 'torch>={oldest}'"
            yield Finding("torch", BAD, (name,), what, fix)


def config(case: Case) -> Iterator[Finding]:
    """Report what the config asks of the engine, and these nodes cannot give."""
    if case.needs.refused:
        what, fix = case.needs.refused
        yield Finding("config", BAD, tuple(node.name for node, _ in case.seen), what, fix)


def imports(case: Case) -> Iterator[Finding]:
    for node, checkup in case.checked_in_depth:
        if checkup.torch is None:
            reason = checkup.problems.get("torch", "")
            yield Finding(
                "torch", UNKNOWN, (node.name,), f"{node.name}: torch was not tried: {reason}"
            )
        elif checkup.torch.error and node.facts and not node.facts.torch:
            continue  # that there is none is said already
        elif checkup.torch.error:
            what = f"{node.name}: importing torch fails: {checkup.torch.error}"
            fix = f"on {node.name}: {checkup.torch.python} -c 'import torch'"
            yield Finding("torch", BAD, (node.name,), what, fix)
        elif node.facts and node.facts.gpus and checkup.torch.available is False:
            torch = checkup.torch
            if not (torch.cuda or torch.hip):
                continue  # built_for_cpus says so
            gpus = plural(node.facts.gpus, "GPU")
            what = f"{node.name} has {gpus}, and its torch can use none"
            built = f"it is built for {'CUDA ' + torch.cuda if torch.cuda else 'ROCm ' + torch.hip}"
            fix = f"on {node.name}: nvidia-smi; {checkup.torch.python} -m torch.utils.collect_env"
            yield Finding("torch", BAD, (node.name,), f"{what}: {built}", fix)


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def without_build(version: str) -> str:
    """Shorten a version to its release: 2.13.0 for 2.13.0+cu130."""
    match = re.match(r"\d+(\.\d+)*", version)
    return match.group() if match else version


def nccl(case: Case) -> Iterator[Finding]:
    versions = {node.name: facts.software.nccl for node, facts in case.seen if facts.gpus}
    for node, checkup in case.checked_in_depth:
        if node.name in versions and checkup.torch and checkup.torch.nccl:
            versions[node.name] = checkup.torch.nccl
    values = [(name, version) for name, version in versions.items() if version]
    fix = "the same torch wheel on all nodes brings the same NCCL"
    yield from unequal("nccl", BAD, "NCCL", values, fix)


def driver(case: Case) -> Iterator[Finding]:
    for kind in ("nvidia_driver", "amd_driver"):
        values = [(node.name, getattr(facts.software, kind)) for node, facts in case.seen]
        values = [(name, version) for name, version in values if version]
        name = f"{kind.partition('_')[0].upper()} driver"
        yield from unequal("driver", WARN, name, values)


def code(case: Case) -> Iterator[Finding]:
    """Compare the program itself, where each node has a copy."""
    scripts = [
        (node.name, checkup.script[:12])
        for node, checkup in case.checked_in_depth
        if checkup.script
    ]
    fix = "copy it: rsync -a WORKDIR/ NODE:WORKDIR/"
    yield from unequal("code", BAD, "sha256 of the program", scripts, fix)
