"""Two ranks that talk over gloo and call one function of a test module; worlds.py forks them."""

import importlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from tests.engine import worlds

WORLD = 2


def run(function: Callable[[int, Path], None], directory: Path) -> str:
    """Return the output of both ranks. The function must be a module's, so that ranks can import
    it.
    """
    env = {"PAIR": f"{function.__module__}:{function.__name__}", "PLACE": str(directory)}
    place = str(directory / f"ranks of {function.__name__}")
    job = worlds.Job(place, [WORLD], {}, env=env, call="tests.engine.pair:rank")
    (codes,) = worlds.run(job)
    said = "".join(job.output(number) for number in range(WORLD))
    assert codes == [0] * WORLD, said
    return said


def rank(_directory: Path) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    module, _, name = os.environ["PAIR"].partition(":")
    dist.init_process_group("gloo")
    getattr(importlib.import_module(module), name)(dist.get_rank(), Path(os.environ["PLACE"]))
    dist.destroy_process_group()
