"""Look for checkpoints where a user means them to be: a step, a directory, an experiment.

A reader creates nothing, marks nothing and removes nothing: another program may be saving there.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import Path

from orchestrator.common.errors import CheckFailed, OrchestratorError, UsageError
from orchestrator.common.text import Say
from orchestrator.engine.ranks.ranks import gather
from orchestrator.engine.saving.search import Accept, Find, in_directory
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import Checkpoint


def named(path: str, local: Path | None = None) -> Find:
    """Look at a step, a directory of steps, or an experiment.

    A node that shares no disk with the head knows experiments by what their jobs left there, beside
    the run whose checkpoints go into `own`.
    """

    def find() -> list[Checkpoint]:
        try:
            return checkpoint_store.resolve(path)
        except UsageError:
            left = [
                checkpoint for place in left_here(path, local) for checkpoint in in_directory(place)
            ]
            if not left:
                raise
            return left

    return find


def left_here(name: str, local: Path | None) -> list[Path]:
    """List where jobs of an experiment left checkpoints on this node."""
    run = local.parent.parent if local is not None else Path()
    name = Path(name).name
    if run.name != "experiment" or not name:
        return []
    pattern = f"{glob.escape(name)}-*/*/experiment/outputs/checkpoints"
    return [
        *sorted(run.parent.parent.parent.glob(pattern)),
        *([local] if local is not None else []),
    ]


def newest(directory: Path, *, searches: bool, accept: Accept, say: Say) -> Find:
    """Look at a directory; if it may search, also at earlier runs of the same program."""
    mentioned: set[str] = set()  # it may look several times

    def pass_over(text: str) -> None:
        if text not in mentioned:
            mentioned.add(text)
            say(text)

    def find() -> list[Checkpoint]:
        checkpoints = in_directory(directory)
        if not searches:
            return checkpoints
        if checkpoints and (reason := reason_against(checkpoints, accept)):
            pass_over(passed_over(directory, reason))
            checkpoints = []
        return checkpoints or earlier_runs(directory, accept, pass_over)

    return find


def earlier_runs(directory: Path, accept: Accept, say: Say = lambda text: None) -> list[Checkpoint]:
    """Find the newest experiment of the same name, next to this one, that has a checkpoint.

    One that another program wrote does not count: programs share the name by default.
    A node that shares no disk has its own: runs/<experiment>-<id>/<node>/experiment.
    """
    run, inner = directory.parent.parent, Path("outputs/checkpoints")
    if run.name == "experiment":
        run, inner = run.parent.parent, Path("*/experiment/outputs/checkpoints")
    same_name = re.fullmatch(r"(.+)_\d{8}_\d{6}(-\w+)?", run.name)
    if same_name is None:
        return []
    pattern = f"{glob.escape(same_name[1])}_[0-9]*_[0-9]*"
    for other in sorted(run.parent.glob(pattern), reverse=True):
        for path in other.glob(str(inner)) if other != run else ():
            checkpoints = in_directory(path, checkpoint_store.exposure(directory))
            if checkpoints and all(checkpoint.foreign for checkpoint in checkpoints):
                say(passed_over(path, checkpoints[0].problem))
            elif checkpoints and not (reason := reason_against(checkpoints, accept)):
                return checkpoints
            elif checkpoints:
                say(passed_over(path, reason))
    return []


def passed_over(directory: Path, reason: str) -> str:
    return f"the checkpoints in {directory} are skipped: {reason}"


def reason_against(checkpoints: Iterable[Checkpoint], accept: Accept) -> str:
    """Say why they are not this program's; one whose manifest is damaged may pass."""
    try:
        for checkpoint in checkpoints:
            if checkpoint.progress is not None:
                accept(checkpoint.progress)
    except CheckFailed as error:
        return error.what
    return ""


# -- what is refused ------------------------------------------------------------------------------


def refuse_unreadable(path: Path) -> None:
    """Look before anything is made."""
    problem: tuple[str, str] | None = None
    if path.is_file():
        problem = (
            f"{path} is a file, and a checkpoint of several ranks is a directory",
            "weights from torch.save: model.load_state_dict(torch.load(FILE)) before the Trainer",
        )
    else:
        try:
            checkpoint_store.resolve(str(path))
        except OrchestratorError as error:
            problem = (error.what, error.fix)
    answers = gather((problem, path.is_file()))
    problems = [problem for problem, _ in answers if problem]
    # Where nodes share no disk, it is enough that one has it.
    if len(problems) == len(answers) or any(is_file for _, is_file in answers):
        raise UsageError(*(problem or problems[0]))


def refuse_later(path: Path, step: int) -> None:
    """Refuse to save next to later steps: new checkpoints would be the first to be removed."""
    highest_here = max((checkpoint.step for checkpoint in checkpoint_store.every(path)), default=0)
    highest = max(gather(highest_here))
    if highest > step:
        raise UsageError(
            f"{path} holds step {highest} of another run, and this one is at step {step}",
            "resume=True (checkpoint.resume=auto) goes on from it; save_to="
            " (checkpoint.directory) names another directory",
        )
