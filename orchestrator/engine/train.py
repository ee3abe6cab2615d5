"""The built-in training, one process per rank: read the config, join the ranks, train.

Started by torchrun on every node: through `master_launch` without a script, or by hand as
`torchrun ... -m orchestrator.engine.train --config FILE`; or by srun, which needs no torchrun.
The training itself, step by step, is in orchestrator/engine/core/loop.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from orchestrator.common.errors import CheckFailed, OrchestratorError
from orchestrator.config import load
from orchestrator.config.schema import Config
from orchestrator.engine.core import settings
from orchestrator.engine.ranks import ranks
from orchestrator.engine.trainer import Trainer


def main() -> None:
    try:
        config = read_config()
        prepare(config)
        ranks.take_place()
        with ranks.joined(config) as everyone:
            trainer = Trainer.from_config(config, everyone)
            trainer.train()
            trainer.close()
    except OrchestratorError as error:
        raise SystemExit(str(error)) from None  # a sentence; what a user's code raises is a trace


def read_config() -> Config:
    """Read what the launch resolved; by hand, a YAML file."""
    parser = argparse.ArgumentParser(description="Train with the built-in engine.")
    parser.add_argument("--config", type=Path, help="a YAML file (needs PyYAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    resolved = settings.of_launch() if options.config is None else None
    return resolved or load.load(options.config, options.set)


def prepare(config: Config) -> None:
    """Set what has to be set before anything is computed."""
    if importlib.util.find_spec("numpy") is None:
        raise CheckFailed(
            f"the engine needs numpy beside torch, and {sys.executable} has none",
            "torch's collectives of objects, and so its checkpoints, use it: pip install numpy",
        )
    sys.path.insert(0, str(Path.cwd()))  # where the job was started, a model.target is looked for
    settings.make_deterministic(config)


if __name__ == "__main__":
    main()
