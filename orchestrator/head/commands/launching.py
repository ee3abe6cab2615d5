"""Launches a job in the background, for a Python program, or for a launch that waits its turn.

Functions import their modules themselves, so that importing this module stays cheap.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.head.background.process import Hears, Pipe

if TYPE_CHECKING:
    from orchestrator.config.launch import LaunchArguments


def launch(
    answers: Hears, arguments: LaunchArguments, command: list[str], *, of_sweep: bool = False
) -> None:
    """Launch a job as `master_launch` does, and follow it; `command` is shown in its record.

    Until it has started, a member of a sweep ends with the sweep's process.
    """
    from orchestrator.head.commands import follow
    from orchestrator.head.screen.events import HeadEvent, event_listener
    from orchestrator.head.start import launch as starting
    from orchestrator.head.start.request import resolve_request

    def queued() -> None:
        if arguments.detach:
            answers.send(queued=os.getpid())

    def draw(event: HeadEvent) -> None:
        kind = type(event).__name__
        answers.send(event=kind, words=event.styled_words(), level=event.level)

    keys = Pipe(needs_asker=of_sweep)
    try:
        request = replace(resolve_request(arguments, command), detached=False)
        with event_listener(draw=draw):
            launched = starting.launch(request, queued)
    finally:
        if arguments.payload is not None:
            shutil.rmtree(arguments.payload, ignore_errors=True)
    keys.needs_asker = False
    launched.experiment.name_head(background=True)
    follow.redirect_output(launched.experiment)
    answers.send(place=str(launched.experiment.path))
    follow.follow_launched(launched, follow.SILENT, keys, arguments.where)
