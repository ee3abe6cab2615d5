"""Jobs from a Python program or a notebook: `from orchestrator import Cluster`.

It asks the same functions as the commands do, in a process of our own (background.py).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar

from orchestrator.api.head_process import INTERRUPT, Background
from orchestrator.api.job import CALLED, Job
from orchestrator.errors import OrchestratorError, UsageError, nearest
from orchestrator.records import experiment
from orchestrator.records.experiment import NAME, Experiment

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
T = TypeVar("T")
StrPath = str | os.PathLike[str]


class Options(TypedDict, total=False):
    """What master_launch has options for, by the names of the `launch:` section of a config."""

    config: StrPath  # a YAML file
    set: Mapping[str, object]  # values of the config, such as {"training.max_steps": 5}
    env: Mapping[str, str]  # variables for every rank
    name: str
    nproc: int
    master_port: int
    start: str
    python: StrPath
    workdir: StrPath
    hook: StrPath
    connect_timeout: float
    node_loss_timeout: float
    on_node_loss: str
    on_head_loss: str
    hang_timeout: float
    on_hang: str
    grace: float
    check: str
    strict_host_keys: bool


class Cluster:
    """The machines of a node list, node_ip_list.txt if none is named.

    Options given here hold for all its jobs; those of launch() win. As a context manager it waits
    at the end of the block for the jobs it launched there, and stops them where an exception
    leaves the block.
    """

    def __init__(
        self,
        nodes: StrPath | None = None,
        *,
        ssh_config: StrPath | None = None,
        experiments: StrPath = "experiments",
        **options: Unpack[Options],
    ) -> None:
        check_names(options)
        self._where: dict[str, Any] = {
            "nodes": absolute("node_ip_list.txt" if nodes is None else nodes),
            "ssh_config": None if ssh_config is None else absolute(ssh_config),
            "experiments": absolute(experiments),
        }
        self._listed = nodes is not None  # else it may be an allocation of Slurm's
        self._options: Options = options
        self._jobs: list[Job] | None = None  # of the `with` block we are in

    def __repr__(self) -> str:
        return f"<Cluster {self._where['nodes']}>"

    def __enter__(self) -> Cluster:
        self._jobs = []
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        jobs, self._jobs = self._jobs or [], None
        first = None
        for job in jobs:  # one that cannot be ended must not keep the others from it
            try:
                job.leave_block(error)
            except BaseException as worse:  # noqa: BLE001  raised below
                first, error = first or worse, error or worse
        if first is not None:
            raise first

    def with_options(self, **options: Unpack[Options]) -> Cluster:
        """The same machines with other options, for run() and submit()."""
        check_names(options)
        other = Cluster(**self._where)
        other._options = merged(self._options, options)
        other._listed, other._jobs = self._listed, self._jobs
        return other

    # -- starting --------------------------------------------------------------------------------

    def launch(
        self,
        script: StrPath | None = None,
        *,
        args: Sequence[object] = (),
        module: str | None = None,
        **options: Unpack[Options],
    ) -> Job:
        """Start a script (a module; without either: the built-in engine) on all nodes together.

        Returns when it has started everywhere. The job does not need this process: it goes on,
        with its logs coming home, when this process ends or is killed.
        """
        if isinstance(args, str):
            raise UsageError(f"args={args!r} is one string", f"write a list: args={args.split()!r}")
        if script is not None and module is not None:
            raise UsageError("a script and a module: which one?", "give one of them")
        if script is None and module is None and args:
            raise UsageError("the built-in engine takes no args", "use config= and set=")
        words = [os.fspath(script)] if script is not None else []
        words += [os.fspath(arg) if isinstance(arg, os.PathLike) else str(arg) for arg in args]
        check_names(options)
        command = ["Cluster.launch", *(["-m", module] if module else []), *words]
        return self._start(merged(self._options, options), command, module=module, program=words)

    def submit(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Start function(*args, **kwargs) in every rank on all nodes; Job.results() has the rest.

        It travels by cloudpickle, with all that it refers to in this program or notebook; modules
        travel by name, and have to be there. The nodes need the same minor version of Python.
        """
        name = getattr(function, "__name__", type(function).__name__)
        options = self._options
        if "name" not in options:
            options = merged(options, {"name": name if NAME.fullmatch(name) else "run"})
        parcel = Path(tempfile.mkdtemp(prefix="orchestrator-"))
        try:
            pack(parcel, name, (function, args, kwargs))
            command = [CALLED, f"{getattr(function, '__module__', '?')}.{name}"]
            return self._start(options, command, parcel=str(parcel))
        finally:
            shutil.rmtree(parcel, ignore_errors=True)

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """function(*args, **kwargs) in every rank on all nodes; what each returned, by rank.

        An exception is raised here as it was there. See submit().
        """
        return self.submit(function, *args, **kwargs).results()

    def _start(
        self, options: Options, command: list[str], *, parcel: str | None = None, **target: Any
    ) -> Job:
        request = {"module": None, "program": [], "detach": False, **self._where, **target}
        words = {**request, **as_typed(options)}
        told = {"command": command, "parcel": parcel, "listed": self._listed}
        head = Background("launch", options=words, **told)
        try:
            place = head.answer()["place"]
        except KeyboardInterrupt:
            self._take_back(head)
            raise
        job = Job(Experiment(Path(place)), self._where, head)
        if self._jobs is not None:
            self._jobs.append(job)
        return job

    def _take_back(self, head: Background) -> None:
        """Ctrl-C while it starts: nothing is left of it, or what has started is stopped."""
        head.press(INTERRUPT)
        try:
            told = head.answer()
        except OrchestratorError:
            return  # it ended before there was a job
        Job(Experiment(Path(told["place"])), self._where, head).wait()

    # -- finding again ---------------------------------------------------------------------------

    def attach(self, experiment: StrPath | None = None) -> Job:
        """Take a job up again: by name or directory, the newest where none is given.

        Also one that another process or machine has started.
        """
        wanted = None if experiment is None else os.fspath(experiment)
        found = self._find(wanted)
        if found is None:
            options = {**self._where, "experiment": wanted}
            found = Path(Background("take_up", options=options).answer()["place"])
        job = Job(Experiment(found), self._where)
        job.take_up()
        return job

    def _find(self, wanted: str | None) -> Path | None:
        found = experiment.find(Path(self._where["experiments"]), wanted)
        return found.path if found else None

    def jobs(self) -> list[Job]:
        """All of the experiments directory, the newest last; looks only."""
        known = experiment.every(Path(self._where["experiments"]))
        return [Job(place, self._where) for place in known]


# -- options ----------------------------------------------------------------------------------


def absolute(path: StrPath) -> str:
    return str(Path(path).expanduser().absolute())


def check_names(options: Mapping[str, object]) -> None:
    known = list(Options.__annotations__)
    for name in options:
        if name not in known:
            raise UsageError(f"no option {name!r}{nearest(name, known)}", f"known: {known}")


def merged(first: Options, then: Options) -> Options:
    """Later ones win; variables and values one by one."""
    env = {**first.get("env", {}), **then.get("env", {})}
    values = {**first.get("set", {}), **then.get("set", {})}
    return {**first, **then, "env": env, "set": values}


def as_typed(options: Options) -> dict[str, Any]:
    """As the command line has them: the config checks and names what is wrong with a value."""
    own = {"config", "set", "env"}
    values = {f"launch.{name}": value for name, value in options.items() if name not in own}
    values = {**values, **options.get("set", {})}
    config = options.get("config")
    return {
        "config_file": None if config is None else absolute(config),
        "overrides": [f"{key}={as_json(value)}" for key, value in values.items()],
        "env": [f"{name}={value}" for name, value in options.get("env", {}).items()],
    }


def as_json(value: object) -> str:
    return json.dumps(value, default=os.fspath)


# -- functions --------------------------------------------------------------------------------


def pack(parcel: Path, name: str, call: tuple[object, ...]) -> None:
    """The call, and the very cloudpickle that can read it: nodes need not have one."""
    import cloudpickle  # type: ignore[import-untyped]

    try:
        with (parcel / "call.pkl").open("wb") as file:
            cloudpickle.dump(call, file)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{name} cannot be sent to the nodes: {error}",
            "files, locks and connections stay here: open them inside the function",
        ) from error
    home = Path(cloudpickle.__file__).parent
    with zipfile.ZipFile(parcel / "cloudpickle.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in home.glob("*.py"):
            archive.write(path, f"cloudpickle/{path.name}")
