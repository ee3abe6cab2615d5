"""Resolve the user's arguments with the config file into the request that a launch starts from."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.common import hiding
from orchestrator.common.errors import UsageError, nearest_file
from orchestrator.common.text import parse_seconds
from orchestrator.config import load
from orchestrator.config.launch import (
    DEFAULT_CONFIG,
    DEFAULT_HOOK,
    LaunchArguments,
    Origin,
    Where,
    check_label,
)
from orchestrator.config.schema import Config
from orchestrator.head.follow import notify as notifying
from orchestrator.head.nodes import environment
from orchestrator.head.plan import accelerate, other_launchers
from orchestrator.head.plan.accelerate import Accelerate
from orchestrator.head.plan.model import EnvSetting, ProgramTarget
from orchestrator.head.plan.plan import CALL, ENGINE
from orchestrator.head.start import variables


@dataclass(frozen=True)
class LaunchRequest:
    """A launch, checked as far as that is possible without the nodes."""

    where: Where
    config: Config
    target: ProgramTarget
    env: tuple[EnvSetting, ...]  # later ones win
    command: tuple[str, ...]
    nodes_from: str | None = None  # list or slurm
    config_file: Path | None = None
    detached: bool = False  # nobody will follow it from here
    payload: Path | None = None  # a directory that travels to the nodes beside the program
    accelerate: Accelerate | None = None  # starts the ranks, in place of torchrun
    begun: float = 0.0  # when the command was typed
    origin: Origin | None = None  # of the code, where it is that of an earlier run
    notify: tuple[str, ...] = ()  # the commands, with what is secret in them
    notes: tuple[str, ...] = ()  # what was read from the config that is written otherwise
    secret_files: tuple[Path, ...] = ()  # they never travel with the code
    directory: Path = field(default_factory=Path.cwd)  # of the program
    hook: str = ""  # the text of that file

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return what is hidden in all that is written down or said of this launch."""
        env = self.config.env.items()
        of_config = [value for name, value in env if hiding.is_secret(name, value)]
        of_options = [setting.value for setting in self.env if setting.secret]
        return hiding.parts([*of_options, *of_config, *notifying.secrets(self.notify)])


def resolve(arguments: LaunchArguments, command: Sequence[str] | None = None) -> LaunchRequest:
    """Read the config and let the options win over it. `command` is shown in the record."""
    target, env = target_of(arguments), variables.given(arguments, os.environ)
    file = arguments.config_file
    if file is None and target.kind == "engine" and arguments.payload is None:
        file = DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None
    config, notes = load.load_and_note(file, arguments.overrides)
    launch = replace(config.launch, **arguments.launch)
    by = accelerate.asked(arguments.start_with, arguments.accelerate_config, target.kind)
    if by is not None:
        launch = accelerate.settle(launch, by)
    if launch.no_torchrun:
        launch = replace(launch, nproc=1)
        if target.kind == "engine" or by is not None:
            what = "accelerate" if by is not None else "the built-in engine"
            raise UsageError(f"{what} needs torchrun's ranks", "leave --no-torchrun out")
    launch = replace(launch, activate=environment.absolute(launch.activate))
    environment.check(launch.activate, launch.wrap)
    if launch.warm is not None:
        parse_seconds("--warm", launch.warm)
    if launch.hook is None and DEFAULT_HOOK.is_file():
        launch = replace(launch, hook=str(DEFAULT_HOOK))
    check_label(launch)
    notify = notifying.checked(launch.notify)
    launch = replace(launch, notify=tuple(map(notifying.shown, notify)))
    return LaunchRequest(
        where=arguments.where,
        config=replace(config, launch=launch),
        target=target,
        env=env,
        command=tuple(sys.argv if command is None else command),
        nodes_from=arguments.nodes_from,
        config_file=file,
        detached=arguments.detach,
        payload=arguments.payload,
        origin=arguments.origin,
        accelerate=by,
        notify=notify,
        begun=time.time(),
        hook=variables.read_hook(launch.hook),
        notes=tuple(notes),
        secret_files=tuple(
            Path(os.path.normpath(Path.cwd() / file)) for file in arguments.env_file
        ),
    )


def without_claims(request: LaunchRequest) -> LaunchRequest:
    """Return a launch on nodes that a scheduler has given to this job alone.

    What numbers GPUs have there is the scheduler's own matter.
    """
    launch = replace(request.config.launch, claim="none", queue=False)
    return replace(request, config=replace(request.config, launch=launch))


def target_of(arguments: LaunchArguments) -> ProgramTarget:
    if arguments.payload is not None:
        return ProgramTarget("engine", CALL, ())
    if arguments.module is not None:
        other_launchers.refuse(("python", "-m", arguments.module, *arguments.program))
        return ProgramTarget("module", arguments.module, arguments.program)
    if arguments.program:
        refuse_a_setting(arguments.program[0])
        if not arguments.launch.get("no_torchrun"):
            other_launchers.refuse(arguments.program)
            other_launchers.refuse_script(arguments.program)
        target = without_python(arguments.program)
        return replace(target, near=nearest_file(target.name, (".py", ".sh")))
    return ProgramTarget("engine", ENGINE, ())


def without_python(program: Sequence[str]) -> ProgramTarget:
    """Take `python train.py` and `python -m pkg` for what they run: each rank is a Python anyway.

    A Python that is named by its path, or has options but -u, is a program as any other.
    """
    first, *rest = program
    if first in ("python", "python3") and rest and not Path(first).exists():
        rest = rest[1:] if rest[0] == "-u" and len(rest) > 1 else rest
        if rest[0] == "-m" and len(rest) > 1:
            return ProgramTarget("module", rest[1], tuple(rest[2:]))
        if rest[0].endswith(".py"):
            return ProgramTarget("auto", rest[0], tuple(rest[1:]))
    return ProgramTarget("auto", first, tuple(program[1:]))


def refuse_a_setting(name: str) -> None:
    """Say how settings and variables are given here; others take them as they stand."""
    key, equals, _ = name.partition("=")
    if equals and key.replace(".", "").isidentifier() and not Path(name).exists():
        option = "--env" if key.isupper() else "--set"
        raise UsageError(f"{name} is not a program", f"did you mean: {option} {shlex.quote(name)}")
