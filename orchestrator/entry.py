"""Start the installed commands, after making sure that they can be interrupted."""

from __future__ import annotations

from orchestrator import interrupt


def main() -> None:
    interrupt.answer_at_once()
    from orchestrator.cli import main as commands

    commands.run(commands.cli, "orchestrator")


def master_launch() -> None:
    interrupt.answer_at_once()
    from orchestrator.cli import main as commands

    commands.run(commands.launch_command, "master_launch")


def emergency_stop() -> None:
    interrupt.answer_at_once()
    from orchestrator.cli import main as commands

    commands.run(commands.emergency_stop_command, "emergency_stop")
