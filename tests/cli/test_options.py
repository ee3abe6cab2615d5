"""A launch's options are defined once; help, config and records use the same set."""

import dataclasses
import importlib
import logging
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from orchestrator.api.cluster import OPTIONS
from orchestrator.cli.chores import doctor_command, nodes_command, plan_command, verify_command
from orchestrator.cli.examples import EXAMPLES
from orchestrator.cli.launch import launch_arguments, launch_command
from orchestrator.cli.main import cli
from orchestrator.cli.options import LAUNCH_OPTIONS, show_log
from orchestrator.common import logs
from orchestrator.common.errors import UsageError
from orchestrator.common.version import __version__
from orchestrator.config import load
from orchestrator.config.launch import (
    COMMON,
    GROUPS,
    Launch,
    LaunchArguments,
    Option,
    View,
    Where,
    options_of,
)
from orchestrator.records.experiment import JobRecord

DEFINED: dict[str, Option] = {
    name: option for kind in LAUNCH_OPTIONS for name, option in options_of(kind).items()
}
COMMANDS = {
    "launch": launch_command,
    "plan": plan_command,
    "doctor": doctor_command,
    "verify": verify_command,
    "nodes": nodes_command,
}
RECORD = JobRecord("job-1", "/e", "done", ["master_launch"], [], 1000.0)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_its_defined_options(name: str) -> None:
    taken = {one.name for one in COMMANDS[name].params if hasattr(one, "group")}
    defined = {key for key, option in DEFINED.items() if name in option.commands}
    assert taken - {"version"} == {*defined, "color", "json", "verbosity"}


def test_every_launch_key_is_option_keyword_and_recorded() -> None:
    keys = {item.name for item in dataclasses.fields(Launch)}
    assert keys == set(options_of(Launch)) == set(load.SECTIONS["launch"])
    others = {option.keyword for option in options_of(LaunchArguments).values() if option.keyword}
    assert set(OPTIONS) == keys | others
    assert set(dataclasses.asdict(RECORD)["launch"]) == keys


def test_unset_options_leave_config_and_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launch_arguments([]) == LaunchArguments(where=Where(), view=View())
    monkeypatch.setenv("NPROC_PER_NODE", "4")
    monkeypatch.setenv("CONFIG_FILE", "c.yaml")
    arguments = launch_arguments([])
    assert (arguments.launch, arguments.config_file) == ({"nproc": 4}, Path("c.yaml"))


# -- as under torchrun ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "module", "program"),
    [
        ("-m pkg.train --name run1 --lr 1", "pkg.train", "--name run1 --lr 1"),
        ("--module pkg.train --config c.yaml", "pkg.train", "--config c.yaml"),
        ("--module=pkg.train --help", "pkg.train", "--help"),
        ("-mpkg.train -m json --nproc 3", "pkg.train", "-m json --nproc 3"),
        ("--check none -m pkg.train -- --depth=2 -- x", "pkg.train", "--depth=2 -- x"),
        ("-m pkg.train -- -- x", "pkg.train", "-- x"),
        ("-m pkg.train", "pkg.train", ""),
        ("--name -m -- train.py -m x --nnodes 2", None, "train.py -m x --nnodes 2"),
        ("train.py -- -m --master_port 3", None, "train.py -- -m --master_port 3"),
    ],
)
def test_words_after_program_belong_to_it(typed: str, module: str | None, program: str) -> None:
    arguments = launch_arguments(typed.split())
    assert (arguments.module, " ".join(arguments.program)) == (module, program)
    assert "nproc" not in arguments.launch


@pytest.mark.parametrize(
    ("typed", "like"),
    [
        ("--nproc_per_node 2", ["--nproc"]),
        ("--standalone", None),
        ("--rdzv-backend c10d", None),
        ("--master-addr 10.0.0.1", ["--master-port"]),
    ],
)
def test_options_of_other_launchers_are_refused(typed: str, like: list[str] | None) -> None:
    with pytest.raises(click.NoSuchOption) as refused:
        launch_arguments([*typed.split(), "train.py"])
    assert like is None or set(like) <= set(refused.value.possibilities or ())


# -- help -----------------------------------------------------------------------------------------


def help_of(command: click.Command, name: str) -> str:
    with command.make_context(name, [], resilient_parsing=True) as context:
        return command.get_help(context)


def test_launch_help_shows_common_options_first() -> None:
    text = CliRunner().invoke(launch_command, ["--help"]).output
    headings = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [f"{COMMON}:", "Examples:"]
    assert sum(option.group == COMMON for option in DEFINED.values()) == 15
    assert "--help --all shows " in text
    whole = CliRunner().invoke(launch_command, ["--help", "--all"]).output
    headings = [line for line in whole.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [*(f"{group}:" for group in GROUPS), "Examples:"]


def test_number_of_commands_and_options_is_bounded() -> None:
    leaves = [path for path, one in walk(cli, "orchestrator") if not hasattr(one, "commands")]
    assert len(leaves) <= 32
    assert sum(isinstance(one, click.Option) for one in launch_command.params) <= 45


def test_launch_answers_with_version() -> None:
    result = CliRunner().invoke(launch_command, ["--version"], prog_name="master_launch")
    assert result.output == f"master_launch, version {__version__}\n"


def test_warm_differs_between_nodes_and_launch() -> None:
    assert nodes_command.make_context("nodes", ["--warm", "list"]).params["warm"] == "list"
    assert launch_arguments(["--warm", "train.py"]).launch == {"warm": "30m"}


def test_removed_command_is_answered() -> None:
    for words, answer in (
        (["who"], "who was removed: orchestrator top --once"),
        (["generate", "slurm"], "generate was removed: docs/containers.md has files"),
    ):
        result = CliRunner().invoke(cli, words, prog_name="orchestrator", standalone_mode=False)
        assert answer in str(result.exception)


def test_every_command_has_a_heading() -> None:
    listed = [name for names in cli.headings.values() for name in names]
    assert sorted(listed) == sorted(cli.commands)


def walk(command: click.Command, path: str) -> list[tuple[str, click.Command]]:
    found: list[tuple[str, click.Command]] = [(path, command)]
    for name, inner in getattr(command, "commands", {}).items():
        found += walk(inner, f"{path} {name}")
    return found


@pytest.mark.parametrize(("path", "command"), walk(cli, "orchestrator"), ids=str)
def test_every_help_is_a_sentence(path: str, command: click.Command) -> None:
    assert (command.help or "").split("\n")[0], path
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help and option.help[0].isupper(), f"{path} {option.name}"


def test_every_command_has_one_line_in_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(cli, "orchestrator").partition("Examples:")[0]
    listed = re.findall(r"^  ([a-z-]+) +\S", text, re.MULTILINE)
    assert {*cli.commands} <= {*listed}
    assert [line for line in text.splitlines() if line.startswith(" " * 10)] == []


def test_help_shows_no_python_type() -> None:
    for path, command in walk(cli, "orchestrator"):
        text = help_of(command, path)
        assert not re.search(r" (INTEGER|FLOAT|RANGE)\b", text), path


@pytest.mark.parametrize(("columns", "widest"), [(60, 80), (90, 90), (200, 100)])
def test_help_fits_terminal_and_ends_with_examples(
    columns: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    longest = 0
    for path, command in walk(cli, "orchestrator"):
        lines = help_of(command, path).splitlines()
        longest = max(longest, *map(len, lines))
        assert len(lines[lines.index("Examples:") + 1 :]) == 6, path
    assert widest - 10 < longest < widest


def test_every_example_parses() -> None:
    commands = dict(walk(cli, ""))
    assert {name.strip() for name in commands} == {*EXAMPLES}
    for typed, _ in (pair for pairs in EXAMPLES.values() for pair in pairs):
        words = shlex.split(re.split(r" (\| less|[<>] )", typed)[0])
        while re.match("[A-Z_]+=", words[0]):
            words.pop(0)
        program, *words = words
        if program != "docker":
            name = (
                {"orchestrator": ""}.get(program, program).replace("master_", "").replace("_", "-")
            )
            while not name or hasattr(commands[f" {name}"], "commands"):
                name = f"{name} {words.pop(0)}".strip()
            commands[f" {name}"].make_context(name, words)


def test_shell_completes_options_and_choices() -> None:
    with launch_command.make_context("master_launch", [], resilient_parsing=True) as context:
        found = [item.value for item in launch_command.shell_complete(context, "--ti")]
        assert found == ["--time-limit"]
        option = next(one for one in launch_command.params if one.name == "sync")
        assert [item.value for item in option.shell_complete(context, "al")] == ["always"]


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["stop", "--grace", "20"], 20.0),
        (["stop", "--grace", "1.5m"], 90.0),
        (["exec", "--timeout", "2h", "true"], 7200.0),
        (["launch", "--grace", "10m", "x.py"], 600.0),
        (["launch", "--hang-timeout", "10m", "x.py"], 600.0),
        (["stop", "--grace", "20x"], "there is no unit 'x'"),
        (["stop", "--grace", "soon"], "not a time"),
    ],
)
def test_durations_accept_units(words: list[str], seconds: float | str) -> None:
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    if isinstance(seconds, str):
        with pytest.raises(click.UsageError, match=seconds):
            command.make_context(words[0], words[1:])
    else:
        params = command.make_context(words[0], words[1:]).params
        assert seconds in [params.get(name) for name in ("grace", "limit", "hang_timeout")]


@pytest.mark.parametrize(("words", "seconds"), [([], None), (["--connect-timeout", "2m"], 120.0)])
@pytest.mark.parametrize(
    ("command", "place", "name"),
    [
        ("status", "orchestrator.head.status.status", "status_command"),
        ("stop", "orchestrator.head.commands.stop", "stop_job"),
    ],
)
def test_connect_timeout_reaches_command(
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    place: str,
    name: str,
    words: list[str],
    seconds: float | None,
) -> None:
    asked: list[Where] = []
    monkeypatch.setattr(
        importlib.import_module(place), name, lambda where, *_, **__: asked.append(where)
    )
    CliRunner().invoke(cli, [command, *words], standalone_mode=False, catch_exceptions=False)
    assert [where.connect_timeout for where in asked] == [seconds]


@pytest.mark.parametrize(("typed", "words"), [("-3", "at least 0"), ("inf", "not a time|at most")])
@pytest.mark.parametrize("command", ["status", "top"])
def test_invalid_connect_timeout_is_refused(command: str, typed: str, words: str) -> None:
    words_typed = [command, f"--connect-timeout={typed}"]
    done = CliRunner().invoke(cli, words_typed, standalone_mode=False)
    assert isinstance(done.exception, (UsageError, click.UsageError))
    assert re.search(
        f"connect-timeout.*({words})", str(getattr(done.exception, "what", None) or done.exception)
    )


@pytest.mark.parametrize(
    ("verbosity", "variable", "level"),
    [
        (0, "", None),
        (1, "", logging.INFO),
        (2, "", logging.DEBUG),
        (5, "", logging.DEBUG),
        (0, "debug", logging.DEBUG),
        (0, "INFO", logging.INFO),
        (1, "debug", logging.INFO),
    ],
)
def test_show_log_prefers_option_over_variable(
    verbosity: int, variable: str, level: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    monkeypatch.setattr(logs, "show_log_on_terminal", lambda level, write: shown.append(level))
    monkeypatch.setenv("ORCHESTRATOR_LOG", variable)
    command = click.Command("x")
    show_log(click.Context(command), click.Option(["-v"]), verbosity)
    assert shown == ([] if level is None else [level])


def test_show_log_rejects_unknown_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_LOG", "loud")
    with pytest.raises(UsageError, match="ORCHESTRATOR_LOG=loud is not a level"):
        show_log(click.Context(click.Command("x")), click.Option(["-v"]), 0)
