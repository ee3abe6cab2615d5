"""Make click options from their definitions, show help in groups, complete names."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from orchestrator.common.errors import EMPTY, UsageError, did_you_mean
from orchestrator.common.text import parse_seconds
from orchestrator.config.launch import (
    COMMON,
    DEFAULT_WARM,
    GROUPS,
    OUTPUT,
    Launch,
    LaunchArguments,
    Option,
    View,
    Where,
    options_of,
)
from orchestrator.protocol.message import hints_of

# Set in a click context, this key makes the help show every option.
EVERY_OPTION = "orchestrator.every_option"
# A launch takes the fields of these classes as options.
LAUNCH_OPTIONS = (Where, LaunchArguments, Launch, View)
# What ORCHESTRATOR_LOG may say, as how many -v it counts.
VERBOSITY = {"": 0, "info": 1, "debug": 2}


class FilePath(click.Path):
    """A path, which is not empty: `"$DIR"` of a shell that has no DIR is not this directory.

    The command that opens the file reports errors: a path of the nodes need not exist here.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(readable=False, **more)

    def convert(self, value: Any, parameter: click.Parameter | None, ctx: Any) -> Any:
        if value == "":
            self.fail(f"the path is empty; {EMPTY}", parameter, ctx)
        return super().convert(value, parameter, ctx)


FILE = FilePath(path_type=Path)
# The help is wrapped to the width of the terminal, and to no more columns.
WIDEST = 100


class Command(click.Command):
    """A command whose help ends with examples, and names values by what they are."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.context_settings.setdefault("max_content_width", WIDEST)
        taken = {flag for option in self.params for flag in option.opts}
        # A command may define -v itself.
        if "-v" not in taken:
            self.params = [*self.params, verbosity_option()]
        for option in self.params:
            if isinstance(option, click.Option) and option.metavar is None and not option.is_flag:
                option.metavar = metavar(option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            # click's parser does not set the command of an error.
            error.ctx = error.ctx or ctx
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from orchestrator.cli.examples import EXAMPLES

        name = ctx.command_path.removeprefix("orchestrator").strip()
        name = {"master_launch": "launch", "emergency_stop": "emergency-stop"}.get(name, name)
        if any("EXP" in piece for piece in self.collect_usage_pieces(ctx)):
            formatter.write("\nEXP is the name or the directory of an experiment.\n")
        with formatter.section("Examples"):
            for typed, words in EXAMPLES.get(name, ()):
                formatter.write(f"{'':{formatter.current_indent}}{typed}\n")
                formatter.write(f"{'':{formatter.current_indent + 4}}{words}\n")


def metavar(option: click.Option) -> str | None:
    """Return N for a number, and for a text the last word of the option's name: --host HOST."""
    if isinstance(option.type, click.types.IntParamType):
        return "N"
    if isinstance(option.type, click.types.FloatParamType):
        return "SECONDS"
    return option.opts[0].rpartition("-")[2].upper() if option.type is click.STRING else None


command = functools.partial(click.command, cls=Command)


# Commands of the version before, and what is typed in their place.
GONE_COMMANDS = {
    "connections": "leave it out: ControlPersist in your ssh_config keeps connections open",
    "diff": "orchestrator report EXP1 EXP2 shows what differs",
    "generate": "docs/containers.md has files for Compose and Kubernetes to copy; submit slurm"
    " --print prints a batch file; --accelerate-config takes accelerate's",
    "label": "name it at its launch: --tag WORD, --set launch.note=TEXT",
    "metrics": "orchestrator track --serve 9400",
    "node": "# before its line in the node list keeps jobs away from a machine",
    "queue": "orchestrator nodes --queue",
    "skill": "orchestrator help agents",
    "start-report": "orchestrator status EXP has the steps of a start on one line",
    "try": "orchestrator help agents shows how a sweep of one line does it",
    "usage": "orchestrator ls --all --json has the nodes and times of each job",
    "warm": "orchestrator nodes --warm list, or --warm off",
    "watch": "orchestrator attach, which a terminal is not needed for: from cron or systemd",
    "who": "orchestrator top --once",
}


class Group(Command, click.Group):
    """A group that names the nearest command, and lists its commands under headings."""

    command_class = Command

    def __init__(self, *args: Any, headings: Mapping[str, tuple[str, ...]] = {}, **more: Any):
        super().__init__(*args, **more)
        self.headings = headings

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            path = f"{ctx.command_path} {args[0]}".removeprefix("orchestrator ")
            if instead := GONE_COMMANDS.get(path):
                raise click.UsageError(f"{path} was removed: {instead}", ctx)
            known = self.list_commands(ctx)
            raise click.UsageError(f"no command {args[0]!r}{did_you_mean(args[0], known)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.commands)
        for heading, names in (self.headings or {"Commands": tuple(self.commands)}).items():
            rows = [
                (name.ljust(width), self.commands[name].get_short_help_str(200)) for name in names
            ]
            with formatter.section(heading):
                formatter.write_dl(rows)


class Seconds(click.ParamType[float]):
    """A number of seconds, or a time with a unit: 90, 90s, 10m."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        with contextlib.suppress(ValueError):
            return float(value)
        try:
            return parse_seconds(param.opts[0] if param else "time", value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class GroupedOption(click.Option):
    """An option that belongs under a heading of the help."""

    def __init__(self, *args: Any, group: str, **more: Any) -> None:
        super().__init__(*args, **more)
        self.group = group


class GroupedCommand(Command):
    """A command whose help shows its own options first, then those of a launch in their groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if sorted(args) in (["--all", "--help"], ["--all", "-h"]):
            ctx.meta[EVERY_OPTION] = True
            args = ["--help"]
        return super().parse_args(ctx, args if ctx.resilient_parsing else own_arguments(self, args))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the command's own options and the common ones; the others for --help --all."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], **{name: [] for name in GROUPS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            # click makes --help, the last of all.
            group = OUTPUT if "--help" in parameter.opts else "Options"
            if record is not None and isinstance(parameter, click.Option):
                groups[getattr(parameter, "group", group)].append(record)
        more = 0
        for name, rows in groups.items():
            if name not in (COMMON, "Options") and EVERY_OPTION not in ctx.meta:
                more += len(rows)
            elif rows:
                with formatter.section(name):
                    formatter.write_dl(rows)
        if more:
            formatter.write(f"\n--help --all shows {more} more options.\n")


def show_log(_: click.Context, __: click.Parameter, verbosity: int) -> None:
    """Show the log on standard error, as -v, -vv or ORCHESTRATOR_LOG ask for."""
    word = os.environ.get("ORCHESTRATOR_LOG", "").lower()
    if word not in VERBOSITY:
        raise UsageError(f"ORCHESTRATOR_LOG={word} is not a level", "set it to info or debug")
    # Importing logging takes 5 ms.
    if level := verbosity or VERBOSITY[word]:
        import logging

        from orchestrator.common import logs
        from orchestrator.head.screen import output

        logs.show_log_on_terminal(logging.INFO if level == 1 else logging.DEBUG, output.complain)


@functools.cache
def verbosity_option() -> click.Option:
    """Return -v, which every command takes."""
    return GroupedOption(
        ["-v", "verbosity"],
        group=OUTPUT,
        count=True,
        expose_value=False,
        is_eager=True,
        callback=show_log,
        help="Log to standard error; -vv: each request.",
    )


def choose_color(_: click.Context, __: click.Parameter, color: bool | None) -> None:
    from orchestrator.head.screen import styles

    styles.choose_colors(color)


def color_option(function: Any) -> Any:
    """Add --color and --no-color to a command; they apply to all its output."""
    return click.option(
        "--color/--no-color",
        cls=GroupedOption,
        group=OUTPUT,
        default=None,
        expose_value=False,
        callback=choose_color,
        help="Colour the output. [default: on a terminal]",
    )(function)


def print_json(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Leave standard output to the result of this command."""
    from orchestrator.head.screen import output

    if wanted:
        ctx.with_resource(output.json_alone())


def json_option(function: Any, group: str = "Options", help: str = "Print JSON.") -> Any:
    """Add --json to a command, which prints its result by output.print_result()."""
    return click.option(
        "--json",
        cls=GroupedOption,
        group=group,
        is_flag=True,
        expose_value=False,
        callback=print_json,
        help=help,
    )(function)


# -- options from their definitions ---------------------------------------------------------------


def launch_options(command: str) -> list[click.Parameter]:
    """Return the options of a launch that this command takes."""
    return [option for kind in LAUNCH_OPTIONS for option in options_from(kind, command)]


@functools.cache
def options_from(kind: type[Any], command: str) -> tuple[click.Option, ...]:
    """Return the options of a class; the cache shares them among commands and saves 30 ms."""
    hints = hints_of(typing.cast(Any, kind))
    return tuple(
        click_option(kind, name, hints[name], option)
        for name, option in options_of(kind).items()
        if command in option.commands
    )


def click_option(kind: type[Any], name: str, hint: Any, option: Option) -> GroupedOption:
    """Return the option of one field. Its default stays None: a config file may set another."""
    value = kind.__dataclass_fields__[name].default
    types_of = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    base = next(candidate for candidate in types_of if candidate is not types.NoneType)
    several = typing.get_origin(base) is tuple
    default = option.shown or (
        "" if value in (None, (), False) else f"{value:g}" if base is float else f"{value}"
    )
    choice = click.Choice(option.choices) if option.choices else None
    path = FILE if base is Path else FilePath() if option.file else None
    flag = {"is_flag": True} if base is bool else {"multiple": several}
    number = Seconds() if option.metavar == "SECONDS" else None
    return GroupedOption(
        [*(option.flags or (f"--{name.replace('_', '-')}",)), name],
        type=None
        if base is bool
        else number or choice or path or (str if several or base is Any else base),
        default=() if several else None,
        metavar=option.metavar or None,
        envvar=option.variable or None,
        help=option.help + (f" [default: {default}]" if default else ""),
        group=option.group,
        **flag,
    )


def arguments_from(params: Mapping[str, Any]) -> LaunchArguments:
    """Return the options that click parsed; options not given keep their defined defaults."""
    typed = {name: value for name, value in params.items() if value not in (None, ())}

    def part(kind: type[Any]) -> dict[str, Any]:
        return {name: typed[name] for name in options_of(kind) if name in typed}

    return LaunchArguments(
        **part(LaunchArguments),
        program=typed.get("program", ()),
        where=Where(**part(Where)),
        view=View(**part(View)),
        launch=part(Launch),
    )


def shared_options(
    function: Callable[..., Any],
    *,
    reads_records: bool = True,
    asks_nodes: bool = False,
) -> Callable[..., Any]:
    """Add --nodes, --ssh-config, --experiments and so on, and hand them on as one `where`."""

    @functools.wraps(function)
    def with_where(**params: Any) -> Any:
        typed = {name: params.pop(name) for name in options if name in params}
        where = Where(**{name: value for name, value in typed.items() if value is not None})
        return function(where=where, **params)

    present = getattr(with_where, "__click_params__", [])
    taken = [*options_from(Where, "launch")]
    taken += options_from(Where, "records") if reads_records else ()
    taken += options_from(Where, "asking") if asks_nodes else ()
    options = {option.name: option for option in taken}
    with_where.__click_params__ = [*present, *reversed(options.values())]  # type: ignore[attr-defined]
    return with_where


asking = functools.partial(shared_options, asks_nodes=True)


def experiment_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of an experiment; skip names that a shell would split or expand.

    bash quotes nothing of it: a repository may come with an experiment `$(command)`.
    """
    root = ctx.params.get("experiments") or Path("experiments")
    names = [path.parent.name for path in Path(root).glob("*/job.json")]
    return sorted(
        name for name in names if name.startswith(incomplete) and shlex.quote(name) == name
    )


# -- words --------------------------------------------------------------------------------------

TIME = re.compile(r"[0-9]+([.][0-9]+)?[a-z]*")


def own_arguments(command: click.Command, arguments: Sequence[str]) -> list[str]:
    """Return the arguments as `command` knows them; what is the program's own stays as it is."""
    known = {
        flag: option
        for option in command.params
        if isinstance(option, click.Option)
        for flag in (*option.opts, *option.secondary_opts)
    }
    rest, words = list(arguments), []
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        flag, equals, value = rest.pop(0).partition("=")
        if flag.startswith("-m") and "-m" in known:
            flag, value = "-m", flag[2:] + equals + value
            words.append(flag + value)
            equals = value
        else:
            # torchrun's options may be spelled with underscores.
            flag = flag if flag in known else flag.replace("_", "-")
            words.append(flag + equals + value)
        option = known.get(flag)
        # The --warm of a launch takes an optional time.
        if flag == "--warm" and isinstance(option, GroupedOption):
            words[-1] = warm_with_its_time(value, rest)
            continue
        if option is not None and not option.is_flag and not equals and rest:
            words.append(rest.pop(0))
        # Those of a sweep take all NAME=VALUES that follow.
        if flag in ("--grid", "--optuna") and option is not None:
            from orchestrator.head.commands.sweep.space import VARIABLE

            while rest and VARIABLE.fullmatch(rest[0]):
                words += ["--grid", rest.pop(0)]
        if flag in ("-m", "--module") and option is not None:
            return [*words, *([] if rest[:1] == ["--"] else ["--"]), *rest]
    return [*words, *rest]


def warm_with_its_time(value: str, rest: list[str]) -> str:
    """Return --warm with the time after it, or with the default if another word follows."""
    if not value and rest and TIME.fullmatch(rest[0]):
        value = rest.pop(0)
    return f"--warm={value or DEFAULT_WARM}"
