"""Start the installed commands, after making sure that they can be interrupted."""

from __future__ import annotations

import gc
import sys

from orchestrator.common import interrupt
from orchestrator.common.errors import no_linux

# Windows lacks modules that the next imports need.
if sys.platform == "win32":
    raise SystemExit(f"error: {no_linux()}")

# Nearly all that a command imports stays: to look through it at every 700 objects took 5 % of the
# processor time of a launch.
gc.set_threshold(50_000)


def main() -> None:
    interrupt.install_handlers()
    from orchestrator.cli.main import cli
    from orchestrator.cli.run import run_command

    run_command(cli, "orchestrator")


def master_launch() -> None:
    interrupt.install_handlers()
    # Importing the other commands takes 20 ms.
    from orchestrator.cli.launch import launch_command
    from orchestrator.cli.run import run_command

    run_command(launch_command, "master_launch")


def emergency_stop() -> None:
    interrupt.install_handlers()
    from orchestrator.cli.main import emergency_stop_command
    from orchestrator.cli.run import run_command

    run_command(emergency_stop_command, "emergency_stop")
