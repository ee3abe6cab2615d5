"""Settings that `orchestrator rerun` takes from an experiment, and those that it cannot know."""

from pathlib import Path

import pytest

from orchestrator.cli.launch import launch_arguments
from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.launch import LaunchArguments, Origin, Where
from orchestrator.config.schema import Config
from orchestrator.head.commands import rerun
from orchestrator.records.experiment import Experiment

EXPERIMENT = Experiment(Path("/project/experiments/multinode_20260101_000000"))
WORDS = ["/usr/bin/master_launch", "--nodes", "list.txt", "--set", "training.seed=1"]


def changed(*words: str, env: tuple[str, ...] = (), where: Where | None = None) -> LaunchArguments:
    directory = Path("/project")
    options = rerun.options_of([*WORDS, *words], EXPERIMENT, directory)
    origin = Origin(EXPERIMENT.name, directory, {"commit": "abc"})
    arguments = launch_arguments(options)
    return rerun.changed_arguments(arguments, where or Where(), env, origin, EXPERIMENT)


def test_rerun_takes_settings_of_experiment_and_paths_of_command_line() -> None:
    arguments = changed("--env", "A", "train.py", "--lr", "3")
    assert arguments.program == ("train.py", "--lr", "3")
    assert arguments.config_file == EXPERIMENT.path / "config.yaml"
    assert arguments.launch == {}
    assert arguments.where.nodes == Path("/project/list.txt")
    assert arguments.origin is not None
    assert arguments.origin.directory == Path("/project")
    assert changed("train.py", where=Where(nodes=Path("/other"))).where.nodes == Path("/other")


def test_rerun_asks_for_hidden_values() -> None:
    hidden = ["--env", "TOKEN=(redacted)", "--env", "OTHER=(redacted)", "train.py"]
    with pytest.raises(UsageError, match=r"TOKEN, OTHER\n.*--env TOKEN=VALUE add --env OTHER"):
        changed(*hidden)
    arguments = changed(*hidden, env=("TOKEN=t", "OTHER"))
    assert arguments.env == ("TOKEN=t", "OTHER")
    with pytest.raises(UsageError, match=r"not recorded: '--key=.redacted"):
        changed("train.py", "--key=(redacted)")
    with pytest.raises(UsageError, match=r"env.KEY was not recorded\n.*--set env.KEY=VALUE"):
        rerun.refuse_hidden(Config(env={"KEY": "(redacted)"}))


def test_options_of_names_foreign_command() -> None:
    there = Path("/a project")
    with pytest.raises(UsageError, match=r"not started by(.|\n)*cd '/a project'; python notebook"):
        rerun.options_of(["python", "notebook"], EXPERIMENT, there)
    assert rerun.options_of(["orchestrator", "launch", "x"], EXPERIMENT, there) == ["x"]


def test_code_of_refuses_code_that_was_not_kept() -> None:
    manifest = {"tree": "0" * 64, "command": "master_launch x"}
    with (
        pytest.raises(CheckFailed, match=r"was not kept.*head.log has the reason"),
        rerun.code_of(EXPERIMENT, manifest, Path("/project")),
    ):
        pass
