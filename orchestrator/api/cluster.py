"""Jobs from a Python program or a notebook: `from orchestrator import Cluster`.

Every launch is a command line of `master_launch`, carried out by a process of its own
(head/background).
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import shutil
import site
import sys
import sysconfig
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from orchestrator.api import head_process
from orchestrator.api.job import CALLED, Job
from orchestrator.common.errors import OrchestratorError, UsageError, did_you_mean
from orchestrator.config.launch import Launch, LaunchArguments, Where, options_of, said_by_shell
from orchestrator.head.background.process import INTERRUPT, Background
from orchestrator.head.commands import launching
from orchestrator.node import pickled_functions
from orchestrator.records import experiments
from orchestrator.records.experiment import NAME, Experiment

if TYPE_CHECKING:
    from fabric import Connection, Group

    from orchestrator.head.connect.ssh import SshTransport
    from orchestrator.head.connect.ssh_config import Destination
    from orchestrator.head.nodes.machine import Machine

StrPath = str | os.PathLike[str]
# The options of `master_launch`, by their names in a config's section `launch:`.
OPTIONS = {
    option.keyword or name: option
    for kind in (LaunchArguments, Launch)
    for name, option in options_of(kind).items()
    if kind is Launch or option.keyword
}
Options = Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


class Machines(list["Machine"]):
    """Machines that show themselves as `orchestrator nodes` does."""

    def __repr__(self) -> str:
        from orchestrator.head.commands.machines.nodes import to_text

        return to_text(self)


class Jobs(list[Job]):
    """Jobs of which the newest show themselves as `orchestrator ls` does."""

    def __repr__(self) -> str:
        from orchestrator.head.commands.ls import to_text

        return to_text([job._experiment for job in self])


class Cluster:
    """The machines of a node list, and the jobs on them.

        from orchestrator import Cluster

        with Cluster("node_ip_list.txt", nproc=8) as cluster:
            job = cluster.launch("train.py", args=["--lr", 1e-4])
            for line in job.logs(follow=True):
                print(line)
            losses = cluster.run(evaluate, "outputs/model.pt")   # one result per rank

    launch() starts a script and returns a Job; run() calls a function in every rank and returns
    what each returned; attach() finds a job again. At the end of a `with` block its jobs are
    waited for, or stopped where an exception leaves the block.

    nodes: the node list; without it that of $ORCHESTRATOR_NODES, the Slurm allocation this runs in,
        or node_ip_list.txt.
    ssh_config: an ssh_config to use in place of yours, or $ORCHESTRATOR_SSH_CONFIG.
    experiments: the directory that holds all experiments.

    The other arguments are options of every job, each of which help(Cluster) describes. Those of
    launch() win over them.

    """

    def __init__(
        self,
        nodes: StrPath | None = None,
        *,
        ssh_config: StrPath | None = None,
        experiments: StrPath = "experiments",
        **options: Any,
    ) -> None:
        check_names(options)
        nodes = said_by_shell(Where, "nodes") if nodes is None else nodes
        ssh_config = said_by_shell(Where, "ssh_config") if ssh_config is None else ssh_config
        self._where = Where(
            nodes=None if nodes is None else absolute(nodes),
            ssh_config=None if ssh_config is None else absolute(ssh_config),
            experiments=absolute(experiments),
        )
        self._options: Options = options
        # The jobs that were started in the present `with` block; None outside of one.
        self._jobs: list[Job] | None = None

    def __repr__(self) -> str:
        return f"<Cluster {absolute(self._where.node_list)}>"

    def __enter__(self) -> Cluster:
        self._jobs = []
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        jobs, self._jobs = self._jobs or [], None
        first = None
        # A job that cannot be ended must not prevent the end of the others.
        for job in jobs:
            try:
                job.leave_block(error)
            except BaseException as worse:  # noqa: BLE001
                first, error = first or worse, error or worse
        if first is not None:
            raise first

    def with_options(self, **options: Any) -> Cluster:
        """Return a Cluster of the same machines with other options, for run() and submit()."""
        check_names(options)
        other = copy.copy(self)
        other._options = merge_options(self._options, options)
        return other

    # -- starting --------------------------------------------------------------------------------

    def launch(
        self,
        script: StrPath | None = None,
        *,
        args: Sequence[object] = (),
        module: str | None = None,
        **options: Any,
    ) -> Job:
        """Start a script (a module; without either: the built-in engine) on all nodes together.

        Returns when it has started everywhere. The job does not need this process: when it ends or
        is killed, the job continues and its logs are still fetched.
        """
        if isinstance(args, str):
            raise UsageError(f"args={args!r} is one string", f"write a list: args={args.split()!r}")
        if script is not None and module is not None:
            raise UsageError("pass either a script or module=, not both")
        if script is None and module is None and args:
            raise UsageError("the built-in engine takes no args", "use config= and set=")
        check_names(options)
        program = [os.fspath(script)] if script is not None else []
        program += [os.fspath(arg) if isinstance(arg, os.PathLike) else str(arg) for arg in args]
        how = ["-m", module] if module is not None else []
        arguments = launch_arguments(self._where, merge_options(self._options, options))
        arguments = replace(arguments, module=module, program=tuple(program))
        return self._start(arguments, ["Cluster.launch", *how, *program])

    def submit(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Start function(*args, **kwargs) in every rank on all nodes; Job.results() waits for it.

        The function is sent by cloudpickle with all that it refers to in this program or notebook;
        modules are imported there by name. The nodes need the same minor version of Python.
        """
        check_callable(function)
        name = getattr(function, "__name__", type(function).__name__)
        options = self._options
        if "name" not in options:
            options = merge_options(options, {"name": name if NAME.fullmatch(name) else "run"})
        payload = Path(tempfile.mkdtemp(prefix="orchestrator-"))
        try:
            pack(payload, name, (function, args, kwargs), here())
            command = [CALLED, f"{getattr(function, '__module__', '?')}.{name}"]
            arguments = replace(launch_arguments(self._where, options), payload=payload)
            return self._start(arguments, command)
        finally:
            shutil.rmtree(payload, ignore_errors=True)

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call function(*args, **kwargs) in every rank, and return the results, one per rank.

        An exception in a rank is raised here. See submit() for what can be sent.
        """
        return self.submit(function, *args, **kwargs).results()

    def nodes(self) -> Machines:
        """Describe what each machine is: CPUs, memory, GPUs, driver, networks, torch, free disk.

        One that cannot be reached is among them, with `reached` False and its `problem`. The list
        shows itself as a table.
        """
        from orchestrator.head.nodes import machine

        arguments = launch_arguments(self._where, self._options)
        answer = Background(head_process.describe_nodes, arguments=arguments).answer()
        return Machines(map(machine.machine_from_json, answer["nodes"]))

    def fabric(self) -> Group:
        """Return the nodes of the list as a group of fabric: run, put, get, sudo on all at once.

        The connections are verified as those of every command here: a changed host key is refused.
        """
        from fabric import ThreadingGroup

        from orchestrator.head.connect.ssh import SshTransport
        from orchestrator.head.connect.ssh_config import SshConfig
        from orchestrator.head.nodes.node_list import read_nodes

        ssh = SshTransport(
            SshConfig(self._where.ssh_config),
            timeout=float(self._options.get("connect_timeout", Launch.connect_timeout)),
            strict=bool(self._options.get("strict_host_keys", False)),
        )
        # The connections are opened on first use.
        return ThreadingGroup.from_connections(
            fabric_connection(ssh, ssh.config.of_node(node))
            for node in read_nodes(absolute(self._where.node_list))
        )

    def _start(self, arguments: LaunchArguments, command: list[str]) -> Job:
        head = Background(launching.launch, arguments=arguments, command=command)
        try:
            directory = head.answer()["place"]
        except KeyboardInterrupt:
            self._take_back(head)
            raise
        job = Job(Experiment(Path(directory)), self._where, head)
        if self._jobs is not None:
            self._jobs.append(job)
        return job

    def _take_back(self, head: Background) -> None:
        """Stop what has started, after Ctrl-C during a start."""
        head.press(INTERRUPT)
        try:
            answer = head.answer()
        except OrchestratorError:
            # The process ended before it had started a job.
            return
        Job(Experiment(Path(answer["place"])), self._where, head).wait()

    # -- finding again ---------------------------------------------------------------------------

    def attach(self, experiment: StrPath | None = None) -> Job:
        """Follow a job by its name or directory; without one, the running or else the newest job.

        Another process or machine may have started it.
        """
        from orchestrator.head.status.status import find_experiment

        wanted = None if experiment is None else os.fspath(experiment)
        known = find_experiment(self._where, wanted)
        if known is None:
            head = Background(head_process.follow_job, where=self._where, experiment=wanted)
            known = Experiment(Path(head.answer()["place"]))
        job = Job(Experiment(known.path), self._where)
        job.take_up()
        return job

    def jobs(self) -> Jobs:
        """List the jobs of the experiments directory, the newest last.

        The list shows itself as a table.
        """
        return Jobs(Job(each, self._where) for each in experiments.list_experiments(self._where))


def fabric_connection(ssh: SshTransport, destination: Destination) -> Connection:
    """Return a connection of fabric's that is not open yet, with the jump hosts before it."""
    from orchestrator.head.connect import fabric_login

    # The ssh program adds a new host to known_hosts, where fabric then finds it.
    if ssh.way_to(destination).by_ssh:
        ssh.connect_to(destination, ssh.timeout).run("true", ssh.timeout).recv(1)
    way = ssh.way_to(destination)
    if way.by_ssh:
        raise UsageError(
            f"fabric cannot reach {destination.name}: {way.why}",
            "use Cluster.run or `orchestrator exec`, which go by the ssh program there",
        )
    gateway: Connection | bool = False
    if destination.jump:
        gateway = fabric_connection(ssh, ssh.config.last_hop(destination.jump))
    return fabric_login.prepare_connection(destination, gateway)


# -- options ----------------------------------------------------------------------------------


def described() -> str:
    """Describe each option in a sentence, as `master_launch --help` does."""
    return "\n".join(
        textwrap.fill(f"{keyword}: {option.help}", 95, subsequent_indent="    ")
        for keyword, option in OPTIONS.items()
    )


def absolute(path: StrPath) -> Path:
    expanded = Path(path).expanduser()
    return expanded if expanded.is_absolute() else here() / expanded


def here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current directory was removed", "os.chdir(...) to another") from None


def check_names(options: Mapping[str, object]) -> None:
    for name in options:
        if name not in OPTIONS:
            known = f"known: {list(OPTIONS)}"
            raise UsageError(f"no option {name!r}{did_you_mean(name, OPTIONS)}", known)


def merge_options(first: Options, then: Options) -> Options:
    """Merge options; later ones win, variables and settings one by one."""
    both = {name: {**first.get(name, {}), **then.get(name, {})} for name in ("env", "set")}
    return {**first, **then, **both}


def launch_arguments(where: Where, options: Options) -> LaunchArguments:
    """Return the options as those of a launch; the config checks the type of each value."""
    # Checked here, as the background process would word the error differently.
    here()
    named = {"config", "set", "env", "env_file", "secret"}
    values: dict[str, object] = {
        f"launch.{name}": os.environ[option.variable]
        for name, option in options_of(Launch).items()
        if os.environ.get(option.variable)
    }
    values |= {
        **{f"launch.{name}": value for name, value in options.items() if name not in named},
        **options.get("set", {}),
    }
    config = options.get("config", os.environ.get("CONFIG_FILE") or None)
    return LaunchArguments(
        config_file=None if config is None else absolute(config),
        overrides=tuple(f"{key}={as_json(value)}" for key, value in values.items()),
        env=tuple(f"{name}={value}" for name, value in options.get("env", {}).items()),
        env_file=tuple(str(absolute(path)) for path in options.get("env_file", ())),
        secret=tuple(options.get("secret", ())),
        where=where,
    )


def as_json(value: object) -> str:
    return json.dumps(value, default=os.fspath)


Cluster.__doc__ = f"{inspect.cleandoc(Cluster.__doc__ or '')}\n\n{described()}\n"


# -- functions that are sent to ranks ---------------------------------------------------------


def places(directory: Path) -> list[str]:
    """List the paths from which this program imports; those below `directory` are relative."""
    found, installed = [], installed_places()
    for place in map(Path, dict.fromkeys(map(os.path.abspath, sys.path))):
        if place.exists() and not f"{place}/".startswith(installed):
            below = place.is_relative_to(directory)
            found.append(str(place.relative_to(directory) if below else place))
    return found


def installed_places() -> tuple[str, ...]:
    """List the directories of the standard library and of installed packages."""
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    packages = (*site.getsitepackages(), site.getusersitepackages())
    return tuple(f"{place}/" for place in (*standard, *packages))


# -- calls --------------------------------------------------------------------------------------


def check_callable(function: object) -> None:
    """Raise UsageError for an object that ranks could not call, before one is started."""
    if not callable(function):
        raise UsageError(
            f"{function!r:.80} is not a function, it is of type {type(function).__name__}",
            "name a function without calling it: run(work, 10), not run(work(10)); "
            "cluster.launch('train.py') starts a script",
        )


def pack(payload: Path, name: str, call: tuple[object, ...], directory: Path) -> None:
    """Write the pickled call, with a copy of cloudpickle, which nodes need not have."""
    import cloudpickle

    try:
        with (payload / "call.pkl").open("wb") as file:
            pickle.dump(places(directory), file)
            pickled_functions.dump(call, file)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{name} cannot be sent to the nodes: {error}",
            "files, locks and connections stay here: open them inside the function",
        ) from error
    home = Path(cloudpickle.__file__).parent
    with zipfile.ZipFile(payload / "cloudpickle.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in home.glob("*.py"):
            archive.write(path, f"cloudpickle/{path.name}")
