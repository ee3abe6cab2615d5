"""The head of a job that a Python program started or takes up: head/commands/background.py.

So the calling program, which may be a notebook, opens no connection and has no thread, signal
handler or child of ours.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.common.errors import UsageError
from orchestrator.head.commands import background
from orchestrator.head.commands.background import (
    INTERRUPT,
    LEAVE,
    Answers,
    Pipe,
    silent,
    speak_into,
    take_up,
    where_of,
)

__all__ = ["INTERRUPT", "LEAVE", "Background"]


class Background(background.Background):
    """The end of the pipe in the asking program."""

    module = __name__


def main(request: dict[str, Any]) -> NoReturn:
    background.serve({"launch": launch, "take_up": take_up, "stop": stop, "nodes": nodes}, request)


def launch(
    answers: Answers, keys: Pipe, arguments: list[str], command: list[str], payload: str | None
) -> None:
    """Do what `master_launch` does with these arguments, or run the function in `payload`."""
    import click

    from orchestrator.cli.launch import launch_arguments
    from orchestrator.head.commands.follow import follow_launched
    from orchestrator.head.start import launch as launching
    from orchestrator.head.start.code import reach_with_code
    from orchestrator.head.start.prepare import prepare
    from orchestrator.head.start.request import resolve

    directory = None if payload is None else Path(payload)
    try:
        launch_args = replace(launch_arguments(arguments), payload=directory)
        request = resolve(launch_args, command)

        def say(text: str) -> None:
            answers.tell(say=text)

        launched = launching.launch(prepare(*reach_with_code(request, say)), say)
        if request.config.launch.warm:
            from orchestrator.head.commands.ready import connections

            connections.keep_after(launched, lambda _: None)
    except click.ClickException as error:  # of a variable such as NPROC_PER_NODE
        raise UsageError(error.format_message()) from error
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
    launched.experiment.name_head(background=True)
    speak_into(launched.experiment)
    answers.tell(place=str(launched.experiment.path))
    follow_launched(launched, silent(), keys, launch_args.where)


def stop(
    answers: Answers, keys: Pipe, where: dict[str, str | bool], experiment: str, grace: float | None
) -> None:
    from orchestrator.head.commands.stop import end_job
    from orchestrator.head.follow import stop as stopping

    ended = end_job(where_of(where), experiment, grace)
    receipts = ended.receipts or []
    answers.tell(
        receipts=[asdict(receipt) for receipt in receipts],
        code=stopping.exit_code(receipts),
        text=stopping.to_text(receipts),
        why=ended.problem,
    )


def nodes(answers: Answers, keys: Pipe, arguments: list[str]) -> None:
    """Describe the machines, as `orchestrator nodes --json` does."""
    from orchestrator.cli.launch import launch_arguments
    from orchestrator.head.nodes import machine
    from orchestrator.head.start.machines import find_machines
    from orchestrator.head.start.request import resolve

    machines = find_machines(resolve(launch_arguments(arguments)))
    answers.tell(nodes=[machine.to_json(described) for described in machines])
