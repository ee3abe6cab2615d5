"""The options of a launch, each defined once, here.

To add one, add a field to `Launch` (which is also a key of the config's section `launch:`) or to
`LaunchArguments` (only on the command line), and type `scripts/config_reference.py`. From the field
come the option with its help (cli/options.py), the keyword of the Python API (api/cluster.py), the
key of a config with its line in docs/config.md, and for `Launch` what job.json keeps. Nothing else
has to be touched but the code that honours it: `request.config.launch.NAME` before a start,
`record.launch.NAME` afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.common.text import parse_seconds
from orchestrator.config.parse import LONGEST_WAIT_SECONDS, Section, check_one_of, waiting_time

COMMON = "Common options"
NODES = "Nodes and network"
PROGRAM = "Program"
FAILURE = "Failures"
OUTPUT = "Output"
GROUPS = (COMMON, NODES, PROGRAM, FAILURE, OUTPUT)

# Commands that examine the nodes for a job.
EXAMINE = ("launch", "plan", "doctor", "verify")
# Commands that connect to the nodes for a job.
REACH = (*EXAMINE, "nodes")
# Commands that ask nodes and start nothing: status, stop, top, warm, ...
ASKING = ("asking",)
# Commands that take a program of the user's.
PLAN = ("launch", "plan", "doctor")
# Commands that plan or start ranks.
RUN = ("launch", "plan", "verify")
START = ("launch",)
# Such a field is a key of a config, which --set reaches, and has no option.
KEY_ONLY: tuple[str, ...] = ()
# Commands that read records: status, attach, stop, logs, prune, ...
RECORDS = ("records",)

MOST_RESTARTS = 10_000
# The limit on one node; slots= in a node list has the same.
MOST_RANKS = 9999
FREE = "leave out one of them"
DEFAULT_NODES = Path("node_ip_list.txt")
# The built-in engine reads this config by default.
DEFAULT_CONFIG = Path("config/multi_node/distributed_two_nodes.yaml")
DEFAULT_WARM = "30m"
DEFAULT_HOOK = Path("scripts/multi_node/config_node.sh")


@dataclass(frozen=True)
class Option:
    """Describe how one field is shown and typed. Its type and default are those of the field."""

    help: str
    group: str
    commands: tuple[str, ...] = RUN
    # The default in words, where the field's own value explains too little.
    shown: str = ""
    choices: tuple[str, ...] = ()
    metavar: str = ""
    # The flags, where the option is not named like the field.
    flags: tuple[str, ...] = ()
    # An environment variable that sets the option as well.
    variable: str = ""
    # If True, shells complete a local path, and the Python API accepts a Path.
    file: bool = False
    # The name of the keyword in the Python API, if it has one.
    keyword: str = ""


def option(default: Any, help: str, group: str, **more: Any) -> Any:
    """Declare a field that is an option; the rest describes it, or bounds its value."""
    bounds = {name: more.pop(name) for name in tuple(more) if name in ("least", "most")}
    described = Option(help, group, **more)
    bounds = {**bounds, "choices": described.choices}
    return field(default=default, metadata={"option": described, "bounds": bounds})


def options_of(kind: type[Any]) -> dict[str, Option]:
    """Map the fields of a class that are options to their descriptions."""
    fields = dataclasses.fields(kind)
    return {item.name: item.metadata["option"] for item in fields if "option" in item.metadata}


def said_by_shell(kind: type[Any], name: str) -> str | None:
    """Return what the environment says of an option, for all commands and programs of a shell."""
    return os.environ.get(options_of(kind)[name].variable) or None


def counts(nnodes: Any) -> tuple[int, int] | None:
    """Read N or MIN:MAX, as torchrun's --nnodes."""
    if nnodes is None:
        return None
    match = re.fullmatch(r"0*([1-9][0-9]{0,3})(?::0*([1-9][0-9]{0,3}))?", str(nnodes))
    least, most = (int(part or match[1]) for part in match.groups()) if match else (1, 0)
    if least > most:
        fix = "write --nnodes 4, or --nnodes 2:4 for at least 2 and at most 4"
        raise UsageError(f"launch.nnodes is {str(nnodes)!r}, which is not a number of nodes", fix)
    return least, most


@dataclass(frozen=True)
class Launch(Section):
    """Settings of a job's start. Command-line options of the same names win over these."""

    name: str = option(
        "multinode",
        "Name the experiment's directory: experiments/NAME_DATE_TIME.",
        COMMON,
        shown="the script's name; multinode for the built-in engine, verify for a verify run",
        metavar="NAME",
    )
    nproc: int | None = option(
        None,
        "Start N ranks on each node, regardless of slots= in the node list.",
        COMMON,
        commands=EXAMINE,
        shown="slots= in the node list, else the number of GPUs, else 1",
        least=1,
        most=MOST_RANKS,
        metavar="N",
        variable="NPROC_PER_NODE",
    )
    # A number, or text such as 2:4. See counts().
    nnodes: Any = option(
        None,
        "Run on N nodes of the list, and keep the others as spares; or on as many from MIN to"
        " MAX as there are.",
        COMMON,
        commands=EXAMINE,
        shown="all that are not marked as spare",
        metavar="N|MIN:MAX",
    )
    gpus: int | None = option(
        None,
        "Use N free GPUs of each node, near each other, and hide the others from the ranks. Each"
        " has one rank, unless --nproc says otherwise.",
        COMMON,
        commands=EXAMINE,
        shown="all",
        least=1,
        most=MOST_RANKS,
        metavar="N",
    )
    claim: str = option(
        "gpus",
        "Start only on GPUs that no other job or program uses, and hold them until the job ends."
        " all: also hold slots of machines without GPUs. none: start beside other jobs.",
        NODES,
        choices=("gpus", "all", "none"),
        commands=("launch", "verify"),
    )
    queue: bool = option(
        False,
        "Wait until the nodes are free: first come, first served.",
        COMMON,
        commands=START,
    )
    after: tuple[str, ...] = option(
        (),
        "Wait until this experiment is done; if it fails, start nothing.",
        NODES,
        commands=START,
        metavar="EXP",
    )
    check: str = option(
        "quick",
        "Check the nodes before the start: quickly, as thoroughly as the doctor, or not at all.",
        COMMON,
        choices=("quick", "full", "none"),
    )
    python: str | None = option(
        None,
        "The Python on nodes that have no python= in the list.",
        PROGRAM,
        commands=REACH,
        metavar="PATH",
        file=True,
    )
    activate: str | None = option(
        None,
        "Run everything on a node in this environment: venv:PATH, conda:NAME,"
        " module:NAME,NAME or script:FILE; activate= in the node list wins.",
        PROGRAM,
        commands=REACH,
        metavar="KIND:WHICH",
    )
    wrap: str | None = option(
        None,
        "Run everything on a node through this command, such as 'docker exec -i NAME'; wrap= in the"
        " node list wins.",
        PROGRAM,
        commands=REACH,
        metavar="COMMAND",
    )
    workdir: str | None = option(
        None,
        "Directory to run in on nodes that have no workdir= in the list.",
        PROGRAM,
        commands=REACH,
        shown="the current directory",
        metavar="DIR",
        file=True,
    )
    sync: str = option(
        "auto",
        "Send the files of this directory to nodes that do not see it, to all nodes, or to none.",
        PROGRAM,
        choices=("auto", "always", "off"),
        commands=("launch", "plan", "doctor"),
    )
    hook: str | None = option(
        None,
        "Shell file that each node sources; the variables it exports reach the ranks.",
        PROGRAM,
        commands=EXAMINE,
        shown=f"{DEFAULT_HOOK} if it exists",
        metavar="FILE",
        file=True,
    )
    start: str = option(
        "fork",
        "How ranks start: fork is faster, from a torchrun that has imported torch; plain is"
        " torchrun's own way.",
        PROGRAM,
        commands=KEY_ONLY,
        choices=("fork", "plain"),
    )
    rank_env: str = option(
        "",
        "Set for each rank also what srun would set (SLURM_PROCID and so on): slurm.",
        PROGRAM,
        commands=KEY_ONLY,
        shown="torchrun's alone",
        metavar="KIND",
    )
    no_torchrun: bool = option(
        False,
        "Run the program once on each node, without torchrun's variables: it starts its ranks by"
        " itself, with MASTER_ADDR, MASTER_PORT, NODE_RANK and NNODES.",
        PROGRAM,
        commands=START,
    )
    warm: str | None = option(
        None,
        "Keep a process with torch imported on each node for TIME after the job, so that the next"
        f" start is quick. Without TIME: {DEFAULT_WARM}.",
        PROGRAM,
        commands=START,
        shown="none",
        metavar="[TIME]",
    )
    node_loss_timeout: float = option(
        60.0,
        "Treat a node as lost after this many seconds without a message.",
        FAILURE,
        least=0,
        most=LONGEST_WAIT_SECONDS,
        metavar="SECONDS",
    )
    hang_timeout: float = option(
        600.0,
        "Find out where the ranks hang after this many seconds without progress; 0: never.",
        FAILURE,
        least=0,
        most=LONGEST_WAIT_SECONDS,
        metavar="SECONDS",
    )
    memory_floor: float | None = option(
        None,
        "End the rank that grew when a node has less free memory than this, before the kernel does"
        " or the machine stands still; 0 never does.",
        FAILURE,
        commands=KEY_ONLY,
        shown="2% of the node, 1 to 4 GB, less on a small or full one",
        least=0,
        metavar="GB",
    )
    max_restarts: int = option(
        0,
        "Start the job again, at most N times, after a failure that may pass: a lost node, a killed"
        " rank, a hang, a broken link.",
        COMMON,
        commands=START,
        shown="none",
        least=0,
        most=MOST_RESTARTS,
        metavar="N",
    )
    time_limit: str | None = option(
        None,
        "End the job after this time, counted over all attempts, even without a head. The ranks"
        " are asked to save and stop --grace before it.",
        COMMON,
        commands=START,
        shown="none",
        metavar="TIME",
    )
    grace: float = option(
        30.0,
        "Seconds that ranks have to save and exit before they are killed, at a stop and after a"
        " failure.",
        FAILURE,
        least=0,
        most=LONGEST_WAIT_SECONDS,
        metavar="SECONDS",
    )
    notify: tuple[str, ...] = option(
        (),
        "Run a shell command when the job ends, fails or is started again, with the event as"
        " JSON on its standard input.",
        OUTPUT,
        commands=START,
        metavar="COMMAND",
    )
    note: str | None = option(
        None, "What the run is for, in lists and pages.", OUTPUT, commands=KEY_ONLY, metavar="TEXT"
    )
    tag: tuple[str, ...] = option(
        (), "Tag the run with a word.", OUTPUT, commands=START, metavar="WORD"
    )
    master_port: int | None = option(
        None,
        "Port on the first node where the ranks meet.",
        NODES,
        commands=EXAMINE,
        shown="29500, or the next free one",
        least=1,
        most=65535,
        metavar="PORT",
        variable="MASTER_PORT",
    )
    connect_timeout: float = option(
        10.0,
        "Seconds to wait for a node to answer.",
        NODES,
        commands=REACH,
        least=0,
        most=LONGEST_WAIT_SECONDS,
        metavar="SECONDS",
    )
    strict_host_keys: bool = option(
        False,
        "Refuse nodes whose host key known_hosts does not list.",
        NODES,
        commands=REACH,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self.nnodes)
        if self.time_limit is not None:
            parse_seconds("--time-limit", self.time_limit)
        if self.queue and self.claim == "none":
            raise UsageError("--queue waits for GPUs to hold, and --claim none holds none", FREE)
        check_one_of("launch.rank_env", self.rank_env, ("", "slurm"))
        if self.no_torchrun and self.nproc not in (None, 1):
            raise UsageError(
                "--no-torchrun runs the program once on each node, and --nproc more often",
                "leave one of them out: a program without torchrun starts its ranks by itself",
            )

    @property
    def variables_of_ranks(self) -> tuple[str, ...]:
        """Return the kinds of variables that ranks get beside torchrun's, or in their place."""
        kinds = (self.rank_env,) if self.rank_env else ()
        return (*kinds, "own") if self.no_torchrun else kinds

    @property
    def node_counts(self) -> tuple[int, int] | None:
        """Return the smallest and the largest number of nodes; None: as the node list says."""
        return counts(self.nnodes)


@dataclass(frozen=True)
class Where:
    """The node list, the ssh_config and the experiments directory: the same for all commands."""

    nodes: Path | None = option(
        None,
        "The node list. Its first node is the master.",
        COMMON,
        commands=REACH,
        shown=str(DEFAULT_NODES),
        metavar="FILE",
        variable="ORCHESTRATOR_NODES",
        file=True,
    )
    ssh_config: Path | None = option(
        None,
        "Use this ssh_config in place of yours.",
        NODES,
        commands=REACH,
        metavar="FILE",
        variable="ORCHESTRATOR_SSH_CONFIG",
        file=True,
    )
    experiments: Path = option(
        Path("experiments"),
        "The directory that holds all experiments.",
        OUTPUT,
        commands=EXAMINE,
        metavar="DIR",
        file=True,
    )

    connect_timeout: float | None = option(
        None,
        "Seconds to wait for a node to answer.",
        NODES,
        commands=ASKING,
        shown="10, or the launch's if that is longer",
        metavar="SECONDS",
    )
    trust_record: bool = option(
        False,
        "Trust the record of an experiment, even if another user could have written it.",
        OUTPUT,
        commands=RECORDS,
    )

    def __post_init__(self) -> None:
        waiting_time("--connect-timeout", self.connect_timeout)

    @property
    def node_list(self) -> Path:
        return self.nodes or DEFAULT_NODES


@dataclass(frozen=True)
class View:
    """The part of a job's logs that is shown."""

    quiet: bool = option(
        False, "Show no log lines; the files have them.", OUTPUT, commands=("launch", "verify")
    )
    node: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Origin:
    """The experiment whose code is launched again, and the directory where that once was."""

    experiment: str
    directory: Path
    # The revision of the code, as in the manifest.
    code: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class LaunchArguments:
    """A launch as it was typed, on the command line or in Python."""

    config_file: Path | None = option(
        None,
        "Read the settings from a YAML file.",
        COMMON,
        commands=REACH,
        shown=f"{DEFAULT_CONFIG} for the built-in engine",
        metavar="FILE",
        flags=("--config",),
        variable="CONFIG_FILE",
        file=True,
        keyword="config",
    )
    overrides: tuple[str, ...] = option(
        (),
        "Override one setting of the config: --set training.max_steps=100.",
        COMMON,
        commands=REACH,
        metavar="KEY=VALUE",
        flags=("--set",),
        keyword="set",
    )
    env: tuple[str, ...] = option(
        (),
        "Set a variable on every rank; without =VALUE, copied from your environment.",
        COMMON,
        commands=EXAMINE,
        metavar="NAME[=VALUE]",
        keyword="env",
    )
    env_file: tuple[str, ...] = option(
        (),
        "Read variables of every rank from a file of NAME=VALUE lines.",
        PROGRAM,
        commands=EXAMINE,
        metavar="FILE",
        file=True,
        keyword="env_file",
    )
    secret: tuple[str, ...] = option(
        (),
        "Set a secret on every rank, from your environment or prompted for; never printed or"
        " recorded.",
        PROGRAM,
        commands=EXAMINE,
        metavar="NAME",
        keyword="secret",
    )
    module: str | None = option(
        None,
        "Run a module, as python -m does.",
        COMMON,
        commands=PLAN,
        metavar="MODULE",
        flags=("-m", "--module"),
    )
    dry_run: bool = option(
        False, "Print what each node would run; start nothing.", COMMON, commands=START
    )
    detach: bool = option(False, "Start the job and leave it running.", COMMON, commands=START)
    nodes_from: str | None = option(
        None,
        "Take the nodes from the node list, or from the Slurm allocation this runs in.",
        NODES,
        commands=REACH,
        shown="the list if there is one",
        choices=("list", "slurm"),
    )
    start_with: str | None = option(
        None,
        "Start the ranks with torchrun, or with `accelerate launch`.",
        PROGRAM,
        commands=("launch", "plan"),
        shown="torchrun",
        choices=("torchrun", "accelerate"),
    )
    accelerate_config: Path | None = option(
        None,
        "Start the ranks with accelerate and this config file, the same for all nodes.",
        PROGRAM,
        commands=("launch", "plan"),
        metavar="FILE",
        file=True,
    )
    program: tuple[str, ...] = ()
    where: Where = field(default_factory=Where)
    view: View = field(default_factory=View)
    # The fields of Launch that were set.
    launch: Mapping[str, Any] = field(default_factory=dict)
    # The origin of the code, if it is that of an earlier run.
    origin: Origin | None = None
    # A directory with a pickled function, which runs as the program.
    payload: Path | None = None

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuse flags that were typed and make no sense where this is used; name the reason."""
        for name, reason in reasons.items():
            if getattr(self, name):
                raise UsageError(f"--{name.replace('_', '-')} {reason}", "leave it out")


def command_words(arguments: LaunchArguments) -> list[str]:
    """Return what would be typed after `master_launch` for such a launch."""
    words: list[str] = []
    for part in (arguments.where, arguments):
        words += typed(
            type(part),
            {
                name: value
                for name, value in vars(part).items()
                if value != type(part).__dataclass_fields__[name].default
            },
        )
    words += typed(Launch, arguments.launch)
    program = ["--", *arguments.program] if arguments.program else []
    module = ["--module", arguments.module] if arguments.module is not None else []
    return [*words, *module, *program]


def typed(kind: type[Any], values: Mapping[str, Any]) -> list[str]:
    """Return options with their values as words."""
    words: list[str] = []
    for name, option in options_of(kind).items():
        flag = option.flags[-1] if option.flags else f"--{name.replace('_', '-')}"
        value = values.get(name)
        for one in value if isinstance(value, tuple) else (value,):
            if name != "module" and one is not None and one is not False:
                if not option.commands:
                    words.append(f"--set=launch.{name}={json.dumps(one)}")
                else:
                    words.append(flag if one is True else f"{flag}={one}")
    return words


# -- tags -------------------------------------------------------------------------------------


LONGEST_TAG = 60


def check_tags(launch: Launch) -> None:
    """Raise UsageError for a tag that a table could not show."""
    for tag in launch.tag:
        if not (tag.isprintable() and re.fullmatch(rf"[^\s,]{{1,{LONGEST_TAG}}}", tag)):
            raise UsageError(
                f"{tag!r} cannot be a tag",
                f"write a word without spaces and commas, of at most {LONGEST_TAG} letters",
            )


def in_one_line(text: str) -> str:
    """Return a text in one line, without control characters for a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
