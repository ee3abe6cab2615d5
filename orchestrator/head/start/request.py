"""Resolve the user's arguments with the config file into the request that a launch starts from."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.common import hiding
from orchestrator.common.errors import UsageError, nearest_file
from orchestrator.common.text import parse_seconds
from orchestrator.config import load
from orchestrator.config.launch import (
    DEFAULT_CONFIG,
    DEFAULT_HOOK,
    Launch,
    LaunchArguments,
    check_tags,
)
from orchestrator.head.events import notify as notifying
from orchestrator.head.nodes import environment
from orchestrator.head.plan import accelerate, other_launchers
from orchestrator.head.plan.plan import CALL, ENGINE
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.start import variables
from orchestrator.protocol.spec import Target

# Rooms above take the launch from here as well.
__all__ = ["LaunchRequest", "resolve_request"]


def resolve_request(
    arguments: LaunchArguments, command: Sequence[str] | None = None
) -> LaunchRequest:
    """Return the request of a launch; options win over the config, `command` goes to the record."""
    target, env = target_of(arguments), variables.user_variables(arguments, os.environ)
    file = arguments.config_file
    if file is None and target.kind == "engine" and arguments.payload is None:
        file = DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None
    config, notes = load.load_and_note(file, arguments.overrides)
    launch = replace(config.launch, **arguments.launch)
    by = accelerate.asked_options(arguments.start_with, arguments.accelerate_config, target.kind)
    if by is not None:
        launch = accelerate.settle_launch(launch, by)
    if launch.no_torchrun:
        refuse_without_torchrun(target, by)
        launch = replace(launch, nproc=1)
    if launch.name == Launch.name and "name" not in arguments.launch:
        launch = replace(launch, name=name_of(target))
    if launch.check != "none" and launch.workdir is None:
        other_launchers.refuse_syntax_error(target)
    launch = replace(launch, activate=environment.absolute_activation(launch.activate))
    check_settings(launch)
    if launch.hook is None and DEFAULT_HOOK.is_file():
        launch = replace(launch, hook=str(DEFAULT_HOOK))
    notify = notifying.check_commands(launch.notify)
    launch = replace(launch, notify=tuple(map(notifying.shown_command, notify)))
    request = LaunchRequest(
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
    # From now on, nothing that is written or printed has them.
    hiding.held.extend(request.secrets)
    return request


def check_settings(launch: Launch) -> None:
    environment.check_environment(launch.activate, launch.wrap)
    if launch.warm is not None:
        parse_seconds("--warm", launch.warm)
    check_tags(launch)


def refuse_without_torchrun(target: Target, by: accelerate.Accelerate | None) -> None:
    if target.kind == "engine" or by is not None:
        what = "accelerate" if by is not None else "the built-in engine"
        raise UsageError(f"{what} needs torchrun's ranks", "leave --no-torchrun out")


def target_of(arguments: LaunchArguments) -> Target:
    if arguments.payload is not None:
        return Target("engine", CALL, ())
    if arguments.module is not None:
        other_launchers.refuse_launchers(("python", "-m", arguments.module, *arguments.program))
        return Target("module", arguments.module, arguments.program)
    if arguments.program:
        refuse_a_setting(arguments.program[0])
        if not arguments.launch.get("no_torchrun"):
            other_launchers.refuse_launchers(arguments.program)
            other_launchers.refuse_script(arguments.program)
        target = without_python(arguments.program)
        return target.replace(near=nearest_file(target.name, (".py", ".sh")))
    return Target("engine", ENGINE, ())


def name_of(target: Target) -> str:
    """Return the name of a program's experiments: that of its script or module."""
    stem = target.name if target.kind == "module" else Path(target.name).stem
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "_", stem).lstrip("_.+-")
    # It may have 100 characters, and a sweep adds a number.
    return Launch.name if target.kind == "engine" else plain[:60] or Launch.name


def without_python(program: Sequence[str]) -> Target:
    """Return the target of a program line; `python train.py` becomes train.py, as ranks run Python.

    A Python that is named by its path, or that has options other than -u, stays a program.
    """
    first, *rest = program
    if first in ("python", "python3") and rest and not Path(first).exists():
        rest = rest[1:] if rest[0] == "-u" and len(rest) > 1 else rest
        if rest[0] == "-m" and len(rest) > 1:
            return Target("module", rest[1], tuple(rest[2:]))
        if rest[0].endswith(".py"):
            return Target("auto", rest[0], tuple(rest[1:]))
    return Target("auto", first, tuple(program[1:]))


def refuse_a_setting(name: str) -> None:
    """Raise with a hint to --set or --env if the program's name looks like a NAME=VALUE setting."""
    key, equals, _ = name.partition("=")
    if equals and key.replace(".", "").isidentifier() and not Path(name).exists():
        option = "--env" if key.isupper() else "--set"
        raise UsageError(f"{name} is not a program", f"did you mean: {option} {shlex.quote(name)}")
