"""`orchestrator rerun`: run the code, the config and the command line of an experiment again."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.common.hiding import REDACTED
from orchestrator.config import load
from orchestrator.config.launch import LaunchArguments, Origin, Where
from orchestrator.config.schema import Config
from orchestrator.head.commands import launch
from orchestrator.head.events import notify
from orchestrator.head.start import launch as starting
from orchestrator.head.start.request import resolve_request
from orchestrator.head.transfer import archive
from orchestrator.records import experiments
from orchestrator.records import manifest as manifests
from orchestrator.records.experiment import Experiment

Parse = Callable[[Sequence[str]], LaunchArguments]


def rerun_experiment(
    where: Where,
    name: str | None,
    parse: Parse,
    *,
    env: Sequence[str] = (),
    overrides: Sequence[str] = (),
    detach: bool = False,
) -> int:
    """Launch an experiment again with its recorded code, not the directory's present one."""
    # The start of the job changes the working directory, so the path must be absolute.
    where = replace(where, experiments=where.experiments.absolute())
    experiment = experiments.require_experiment(where, name)
    # The manifest's command is executed, so this login must have launched it.
    experiment.check_launched(experiment.read_record())
    manifest = read_manifest(experiment)
    words = shlex.split(str(manifest.get("command", "")))
    began, directory = Path.cwd(), Path(str(manifest.get("directory", "")))
    arguments = parse(options_of(words, experiment, directory))
    origin = Origin(experiment.name, directory, manifest.get("code"))
    arguments = changed_arguments(arguments, where, env, origin, experiment)
    arguments = replace(arguments, overrides=tuple(overrides), detach=detach)
    config = load.load_config(arguments.config_file, arguments.overrides)
    refuse_hidden(config)
    with code_of(experiment, manifest, directory) as workdir:
        os.chdir(workdir)
        try:
            options = {**hook_of(config, directory), **notified(experiment, overrides)}
            launched = starting.launch(resolve_request(replace(arguments, launch=options), words))
        finally:
            os.chdir(began)
    return launch.follow_or_detach(launched, arguments)


def read_manifest(experiment: Experiment) -> dict[str, Any]:
    if data := manifests.read_manifest(experiment):
        return data
    raise CheckFailed(f"{experiment.name} has no manifest.json to run it from")


def options_of(words: Sequence[str], experiment: Experiment, directory: Path) -> Sequence[str]:
    """Return what followed `master_launch` or `orchestrator launch`."""
    program = Path(words[0]).name if words else ""
    if program == "master_launch":
        return words[1:]
    if program in ("orchestrator", "__main__.py") and words[1:2] == ["launch"]:
        return words[2:]
    there = f"cd {shlex.quote(str(directory))}; {shlex.join(words)}"
    kept = f"its code then is in {shlex.quote(str(experiment.path / archive.NAME))}"
    raise UsageError(
        f"{experiment.name} was not started by master_launch, but by a program, which has what the"
        " nodes were given only while it runs",
        f"run the program again: {there}" + (f"; {kept}" if has_code(experiment) else ""),
    )


def has_code(experiment: Experiment) -> bool:
    return (experiment.path / archive.NAME).is_file()


def changed_arguments(
    arguments: LaunchArguments,
    where: Where,
    again: Sequence[str],
    origin: Origin,
    experiment: Experiment,
) -> LaunchArguments:
    """Return the recorded arguments with the options given now; paths resolve where typed."""
    directory = origin.directory
    hidden = [word for word in arguments.program if REDACTED in word]
    if hidden:
        raise UsageError(
            f"the command line of {experiment.name} had values that were not recorded:"
            f" {shlex.join(hidden)}",
            "type the launch again",
        )
    names = {word.partition("=")[0] for word in again}
    env = [word for word in arguments.env if word.partition("=")[0] not in names]
    lost = [word.partition("=")[0] for word in env if REDACTED in word]
    if lost:
        raise UsageError(
            f"the values of --env were not recorded: {', '.join(lost)}",
            " ".join(f"add --env {name}=VALUE" for name in lost),
        )
    own = arguments.where
    node_list = where.nodes or directory / own.node_list
    ssh_config = where.ssh_config or (own.ssh_config and directory / own.ssh_config)
    accelerate = arguments.accelerate_config
    return replace(
        arguments,
        config_file=experiment.path / "config.yaml",
        env=(*env, *again),
        env_file=tuple(str(directory / file) for file in arguments.env_file),
        accelerate_config=accelerate and directory / accelerate,
        origin=origin,
        dry_run=False,
        where=replace(
            own,
            nodes=absolute(node_list),
            ssh_config=absolute(ssh_config),
            experiments=where.experiments.absolute(),
        ),
    )


def absolute(path: Path | None) -> Path | None:
    return path.absolute() if path else None


def refuse_hidden(config: Config) -> None:
    """Refuse a command line in which a secret was redacted."""
    for name, value in config.env.items():
        if REDACTED in value:
            raise UsageError(
                f"the value of env.{name} was not recorded", f"add --set env.{name}=VALUE"
            )


def hook_of(config: Config, directory: Path) -> dict[str, Any]:
    """Find a hook that is not in the code where it was then."""
    hook = config.launch.hook
    return {"hook": str(directory / hook)} if hook and not Path(hook).is_file() else {}


def notified(experiment: Experiment, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the experiment's --notify commands: its config has their programs alone."""
    if any(word.startswith("launch.notify=") for word in overrides):
        return {}
    return {"notify": notify.kept_commands(experiment)}


@contextlib.contextmanager
def code_of(experiment: Experiment, manifest: Mapping[str, Any], directory: Path) -> Iterator[Path]:
    """Yield a directory with the code of a run; it exists while the code is sent."""
    kept = experiment.path / archive.NAME
    if not has_code(experiment):
        raise CheckFailed(
            f"the code of {experiment.name} was not kept: {experiment.head_log} has the reason,"
            " unless it ran where it was, with --sync off or in directories of workdir=",
            f"cd {shlex.quote(str(directory))}; {manifest.get('command')}",
        )
    digest = str(manifest.get("kept") or manifest["tree"])
    with archive.unpacked_archive(kept, digest, directory.name) as place:
        yield place
