"""Where the installed commands begin. First of all they learn to be interrupted."""

from __future__ import annotations

from orchestrator import interrupt


def main() -> None:
    interrupt.answer_at_once()
    from orchestrator import cli

    cli.run(cli.cli, "orchestrator")


def master_launch() -> None:
    interrupt.answer_at_once()
    from orchestrator import cli

    cli.run(cli.launch_command, "master_launch")


def emergency_stop() -> None:
    interrupt.answer_at_once()
    from orchestrator import cli

    cli.run(cli.emergency_stop_command, "emergency_stop")
