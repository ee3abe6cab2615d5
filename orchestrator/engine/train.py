"""Run the built-in training, one process per rank: read the config, join the ranks, train.

torchrun starts it on every node: through `master_launch` without a script, or by hand as
`torchrun ... -m orchestrator.engine.train --config FILE`. srun can start it without torchrun.
The training loop is in orchestrator/engine/core/loop.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist

from orchestrator.common.errors import OrchestratorError
from orchestrator.config import load
from orchestrator.config.schema import Config
from orchestrator.engine.core import parts, settings
from orchestrator.engine.core.settings import TrainerSettings
from orchestrator.engine.core.training import Training
from orchestrator.engine.data import sources
from orchestrator.engine.ranks import ranks
from orchestrator.engine.ranks.ranks import Ranks


def main() -> None:
    try:
        config = read_config()
        # This is set before anything is computed.
        settings.make_deterministic(config)
        ranks.set_rank_variables()
        training = training_of(config, ranks.join_group(config))
        training.train()
        training.reporting.trackers.close()
        # After an error this is skipped: other ranks may be in a collective that never ends.
        dist.destroy_process_group()
    except OrchestratorError as error:
        # Only errors of our own end in one sentence; those of a user's code keep their traceback.
        raise SystemExit(str(error)) from None


def training_of(config: Config, everyone: Ranks) -> Training:
    """Return the training that a config describes, with its model, optimizer and data."""
    made = parts.parts_of_config(config, everyone)
    logging = made.config.logging
    trackers = {name: logging.tracker_options.get(name) for name in logging.trackers}
    given = TrainerSettings(trackers=trackers)
    return Training(made, given, sources.load_samples(made.config, everyone))


def read_config() -> Config:
    """Return the config that the launch resolved, or the one of --config and --set."""
    parser = argparse.ArgumentParser(description="Train with the built-in engine.")
    parser.add_argument("--config", type=Path, help="a YAML file (needs PyYAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    resolved = settings.config_of_launch() if options.config is None else None
    return resolved or load.load_config(options.config, options.set)


if __name__ == "__main__":
    main()
