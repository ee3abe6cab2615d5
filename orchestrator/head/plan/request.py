"""A launch as the head sees it from the typed word to the plan: one value for all its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.common import hiding
from orchestrator.config import load
from orchestrator.config.launch import Origin, Where
from orchestrator.config.schema import Config
from orchestrator.head.plan.accelerate import Accelerate
from orchestrator.head.plan.model import EnvSetting
from orchestrator.protocol.spec import Target


@dataclass(frozen=True)
class LaunchRequest:
    """A launch, checked as far as that is possible without the nodes."""

    where: Where
    config: Config
    target: Target
    # Later settings override earlier ones.
    env: tuple[EnvSetting, ...]
    command: tuple[str, ...]
    # The source of the nodes: "list" or "slurm".
    nodes_from: str | None = None
    config_file: Path | None = None
    # With --detach this head does not follow the job.
    detached: bool = False
    # A directory that is sent to the nodes beside the program.
    payload: Path | None = None
    # If set, Accelerate starts the ranks instead of torchrun.
    accelerate: Accelerate | None = None
    # The time at which the command was typed.
    begun: float = 0.0
    # The earlier run whose code is used, for a rerun.
    origin: Origin | None = None
    # The notify commands, secrets included.
    notify: tuple[str, ...] = ()
    # Notes on outdated spellings in the config file.
    notes: tuple[str, ...] = ()
    # These files are never sent with the code.
    secret_files: tuple[Path, ...] = ()
    # The working directory of the program.
    directory: Path = field(default_factory=Path.cwd)
    # The text of the hook file.
    hook: str = ""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the values that are hidden in all records and messages of this launch."""
        env = self.config.env.items()
        of_config = [value for name, value in env if hiding.is_secret(name, value)]
        of_options = [setting.value for setting in self.env if setting.secret]
        # The config has those notify commands as they are that may be shown.
        hidden = [command for command in self.notify if command not in self.config.launch.notify]
        return hiding.secret_texts([*of_options, *of_config, *hidden])

    @cached_property
    def config_data(self) -> dict[str, Any]:
        """Return the config as JSON has it, made once for all nodes."""
        return load.config_as_data(self.config)
