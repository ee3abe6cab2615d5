"""Draws logins, options and variables at random, and compares what ranks see of each kind of start.

A cold start, one from a process that waited, and a second attempt: either nothing differs that a
program could act upon, or the start was cold and says why.
"""

from __future__ import annotations

import json
import random
import re
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.node.job.processes import OPTIONS
from orchestrator.node.warm import standbys
from orchestrator.protocol.events import Ended
from orchestrator.protocol.message import encode
from orchestrator.protocol.requests.start import Start
from orchestrator.protocol.spec import Attempt, Placement, Spec
from tests.node.running import PYTHON, Job, alive, wait_until
from tests.node.warm.conftest import WarmNode
from tests.node.warm.what_a_rank_sees import MARK

PROGRAM = Path(__file__).with_name("what_a_rank_sees.py")
VISIT = Path(__file__).with_name("visit_of_a_login.py")
LIBM = next(iter(sorted(Path("/lib").glob("*/libm.so.6"))), None)
# Only a further attempt has these, and says so.
OF_AN_ATTEMPT = re.compile(r"""((?:ORCHESTRATOR_ATTEMPT|TORCHELASTIC_RESTART_COUNT)(?:=|": "))\d""")

VARIABLES: dict[str, list[str]] = {
    "LANG": ["C", "C.UTF-8", "POSIX", "nowhere.UTF-8"],
    "LC_ALL": ["C", "C.UTF-8", ""],
    "LC_CTYPE": ["C", "C.UTF-8"],
    "TZ": ["UTC", "Asia/Tokyo", "nowhere", ""],
    "TERM": ["dumb", "xterm"],
    "COLUMNS": ["80", "200"],
    "LINES": ["25"],
    "SSH_CONNECTION": ["10.0.0.1 5 10.0.0.2 22"],
    "SSH_AUTH_SOCK": ["/tmp/agent"],
    "XDG_SESSION_ID": ["7", "8"],
    "XDG_CACHE_HOME": ["/tmp/cache"],
    "HOME": ["/tmp", "/nowhere"],
    "TMPDIR": ["/var/tmp", "/nowhere"],
    "OMP_NUM_THREADS": ["1", "3"],
    "MKL_NUM_THREADS": ["2"],
    "OPENBLAS_NUM_THREADS": ["1"],
    "CUDA_VISIBLE_DEVICES": ["", "0"],
    "NCCL_DEBUG": ["INFO"],
    "PYTHONHASHSEED": ["0", "17", "random"],
    "PYTHONUNBUFFERED": ["1", ""],
    "PYTHONWARNINGS": ["ignore", "error::DeprecationWarning", "default"],
    "PYTHONOPTIMIZE": ["1", "2"],
    "PYTHONDEVMODE": ["1"],
    "PYTHONFAULTHANDLER": ["1"],
    "PYTHONTRACEMALLOC": ["1"],
    "PYTHONMALLOC": ["malloc"],
    "PYTHONDONTWRITEBYTECODE": ["1"],
    "PYTHONUTF8": ["0", "1"],
    "PYTHONCOERCECLOCALE": ["0"],
    "PYTHONIOENCODING": ["latin-1", "utf-8:replace"],
    "PYTHONNOUSERSITE": ["1"],
    "PYTHONSAFEPATH": ["1"],
    "PYTHONINTMAXSTRDIGITS": ["1000"],
    "PYTHONPYCACHEPREFIX": ["/tmp/pycache"],
    "PYTHONBREAKPOINT": ["0"],
    "PYTHONVERBOSE": [""],
    "LD_PRELOAD": [str(LIBM)] if LIBM else [],
    "MALLOC_ARENA_MAX": ["1"],
    "GLIBC_TUNABLES": ["glibc.malloc.check=1"],
    "HF_HOME": ["/tmp/hf"],
    "HF_TOKEN": ["hf_abcdefgh12345678"],
    "LR": ["0.1", "0.2"],
    "EMPTY": [""],
    "LONG": ["x" * 1000, "y" * 60_000],
    "LINES_OF_TEXT": ["one\ntwo\n", "\t three"],
    "UNICODE": ["schön", "\udcff\udcfe", "日本"],
    "ödd": ["name"],
    "with-dash.and dot": ["1"],
    "lower_case": ["1"],
    "API_KEY": ["s3cret-value-of-mine"],
    "DATABASE": ["postgres://me:s3cret@host/"],
    "RANK": ["5"],
    "MASTER_ADDR": ["elsewhere"],
    "ORCHESTRATOR_ATTEMPT": ["9"],
    "ALSO_IMPORTS": ["numpy numpy.random", "yaml json decimal"],
    "HOOK": ["on", "other"],
    "_": ["/usr/bin/env"],
    "SHLVL": ["3"],
    "PWD": ["/nowhere"],
}
SITE = {  # a file that Python runs at its start, and what is in it
    "sitecustomize": "import builtins, os\nbuiltins.HOOKED = os.environ.get('HOOK', 'off')\n",
    "usercustomize": "import sys\nsys.setrecursionlimit(1234)\n",
}
LOGINS: dict[str, list[Any]] = {
    "umask": [0o022, 0o027, 0o000],
    "nice": [1, 5, 19],
    "oom_score_adj": [0, 100, 700],
    "coredump_filter": ["0x33", "0x1"],
    "personality": [0x0040000],  # no random addresses
    "limits": [
        [[resource.RLIMIT_NOFILE, 256, 4096]],
        [[resource.RLIMIT_CORE, 0, 0]],
        [[resource.RLIMIT_CORE, 0, -1]],
        [[resource.RLIMIT_STACK, 4 << 20, -1]],
        [[resource.RLIMIT_MEMLOCK, 1 << 16, 1 << 16]],
    ],
    "CPUs": [[0]],
    "scheduler": [3, 5],  # batch, idle
    "timer slack": [70_000],
    "no new privileges": [True],
    "ignored": [[1], [2, 3], [13], [10, 12]],
    "blocked": [[10], [14, 15]],
    "groups": [[], [4, 20]],
    "directory": ["/", "/tmp"],
}
NEEDS_ROOT = {"groups", "oom_score_adj"}


@dataclass(frozen=True)
class Draw:
    """A login and a launch, as they were drawn."""

    login: dict[str, Any]
    environ: dict[str, str]  # of the login
    env: dict[str, str]  # of the launch,
    unset: tuple[str, ...]
    args: tuple[str, ...]
    kind: str
    secrets: tuple[str, ...] = ()

    def changed(self, dice: random.Random, changes: int, *, login: bool = False) -> Draw:
        """Return what another login and launch would be, that differ in so many things."""
        own, environ, env = dict(self.login), dict(self.environ), dict(self.env)
        for _ in range(changes):
            where = dice.choice([own, environ, environ, environ if login else env])
            pool: dict[str, list[Any]] = LOGINS if where is own else VARIABLES
            name = dice.choice([name for name, values in pool.items() if values])
            where[name] = dice.choice(pool[name])
        return Draw(own, environ, env, self.unset, self.args, self.kind, self.secrets)


def some(dice: random.Random, pool: dict[str, list[Any]], most: int) -> dict[str, Any]:
    names = [name for name, values in pool.items() if values]
    chosen = dice.sample(names, dice.randint(0, most))
    return {name: dice.choice(pool[name]) for name in chosen}


def draw(dice: random.Random) -> Draw:
    base = {"HOME": "/root", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "USER": "root"}
    environ = {**base, **some(dice, VARIABLES, 6)}
    return Draw(
        login={"umask": 0o022, **some(dice, LOGINS, 3)},
        environ=environ,
        env=some(dice, VARIABLES, 5),
        unset=tuple(dice.sample(sorted(VARIABLES), dice.choice([0, 0, 1]))),
        args=tuple(
            dice.sample(["--lr=0.1", "a b", "", "ünï", "-c", "x" * 5000], dice.randint(0, 2))
        ),
        kind=dice.choice(["script", "script", "module", "directory"]),
        secrets=tuple(dice.sample(["API_KEY", "LR"], dice.choice([0, 0, 1]))),
    )


@dataclass
class Differences:
    """What two ranks saw differently: place -> both."""

    found: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def compare(self, before: Any, after: Any, place: str = "") -> None:
        if isinstance(before, dict) and isinstance(after, dict):
            for name in sorted({*before, *after}):
                self.compare(before.get(name), after.get(name), f"{place}/{name}")
        elif isinstance(before, list) and isinstance(after, list) and before and after:
            lacks = [each for each in before if each not in after]
            more = [each for each in after if each not in before]
            if before != after:
                self.found[place] = (lacks, more) if lacks or more else (before, after)
        elif before != after:
            self.found[place] = (before, after)


@dataclass(frozen=True)
class Outcome:
    """A job that was started, and is over."""

    job: Job
    seen: list[dict[str, Any]]  # by each rank
    warm: bool
    why: str = ""


class Starts:
    """Starts jobs as they were drawn, on one node, and reads what their ranks saw."""

    def __init__(self, node: WarmNode) -> None:
        self.node = node
        self.home = node.new_job().home

    def visit(self, drawn: Draw, *requests: Any, ready_for: str = "") -> list[Any]:
        environ = {**drawn.environ, "ORCHESTRATOR_HOME": str(self.home)}
        orders = {
            "login": drawn.login,
            "ready for": ready_for,
            "requests": [{"do": each.do, **encode(each)} for each in requests],
        }
        done = subprocess.run(
            [PYTHON, *OPTIONS, str(VISIT), str(self.node.library)],
            env=environ,
            input=json.dumps(orders),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return list(json.loads(done.stdout))

    def spec(self, job: Job, drawn: Draw, **fields: Any) -> Spec:
        spec = self.node.spec(
            job, "", env={**drawn.env, "NNODES": "1"}, unset=list(drawn.unset), **fields
        )
        home = self.node.directory / "work"
        (home / "package").mkdir(parents=True, exist_ok=True)
        program = PROGRAM.read_text()
        for name in ("program.py", "module.py", "package/__main__.py"):
            (home / name).write_text(program)
        if "PYTHONSAFEPATH" in {**drawn.environ, **drawn.env}:  # no module is found here then
            drawn = replace(drawn, kind="script")
        name = {"script": "program.py", "module": "module", "directory": "package"}[drawn.kind]
        kind = "module" if drawn.kind == "module" else "script"
        target = spec.target.replace(kind=kind, name=name, args=drawn.args)
        return spec.replace(target=target, workdir=str(home), secrets=drawn.secrets)

    def seen(self, job: Job, supervisor: int) -> list[dict[str, Any]]:
        wait_until(lambda: job.run.last(Ended), "the end of the job")
        wait_until(lambda: not alive(supervisor), "the end of its supervisor")
        found = []
        for stream, said in sorted(job.output.items()):
            lines = [line for line in said.splitlines() if line.startswith(MARK)]
            if stream.isdigit():
                assert len(lines) == 1, said[-3000:]
                seen = OF_AN_ATTEMPT.sub(r"\1", lines[0][len(MARK) :])
                seen = re.sub(r"\bjob-\d+-\d+", "JOB", seen)
                found.append(json.loads(seen))
        assert found, job.output
        return found

    def start(self, drawn: Draw, **fields: Any) -> Outcome:
        """Start a job to its end: what its ranks saw, and whether the start was warm."""
        job = self.node.new_job()
        attempt = attempt_of(job, 1)
        (answer,) = self.visit(drawn, Start(spec=self.spec(job, drawn, attempt=attempt, **fields)))
        return Outcome(job, self.seen(job, answer["supervisor"]), **answer["warm"])

    def again(self, drawn: Draw, first: Job) -> Outcome:
        """Start a second attempt of a job."""
        job = self.node.new_job()
        places = {"job": job.run.job, "node": 0, "nnodes": 1, "first_rank": 0, "master": ""}
        place = Placement(**places, port=0, attempt=Attempt(**attempt_of(first, 2)))
        (answer,) = self.visit(drawn, Start(place=place))
        return Outcome(job, self.seen(job, answer["supervisor"]), **answer["warm"])

    def wait_with(self, drawn: Draw, job: Job) -> None:
        """Let processes wait for what follows a job, in such a login."""
        self.visit(drawn, ready_for=job.run.job)
        wait_until(lambda: self.node.find_ready() or not standbys.find_all(), "what waits")


def attempt_of(first: Job, number: int) -> dict[str, Any]:
    return {"number": number, "restarts": 3, "first_job": first.run.job, "first_node": 0}


@dataclass(frozen=True)
class Compared:
    """A start beside the cold one that it must equal."""

    kind: str
    warm: bool
    why: str
    found: dict[str, tuple[Any, Any]]


def compared(kind: str, first: Outcome, cold: Outcome, other: Outcome) -> Compared:
    differences = Differences()
    for before, after in zip(cold.seen, other.seen, strict=True):
        # What the last job had imported from installed packages is there, of all that a start does.
        more = set(after["interpreter"]["modules"]) - set(before["interpreter"]["modules"])
        if more <= set(first.seen[0]["imported"]):
            after["interpreter"]["modules"] = before["interpreter"]["modules"]
        same = [one for one in after.pop("drawn") if one in before.get("drawn", ())]
        differences.compare(
            {**before, "drawn": [], "imported": []}, {**after, "drawn": same, "imported": []}
        )
    return Compared(kind, other.warm, other.why, differences.found)


def a_round(seed: int, node: WarmNode) -> Iterator[Compared]:
    """Draw a launch, and start it in each way there is."""
    dice, starts = random.Random(seed), Starts(node)
    for name, text in SITE.items():
        if dice.random() < 0.3:
            node.package(name, text)
    drawn = draw(dice)
    first = starts.start(drawn, fresh=True)
    starts.wait_with(drawn.changed(dice, dice.choice([0, 0, 1, 2]), login=True), first.job)
    then = drawn.changed(dice, dice.choice([0, 0, 0, 1]))
    cold = first if then == drawn else starts.start(then, fresh=True)
    yield compared("warm", first, cold, starts.start(then))
    starts.wait_with(drawn, first.job)
    yield compared("attempt 2", first, first, starts.again(drawn, first.job))
    for each in standbys.find_all():
        standbys.end(each)
