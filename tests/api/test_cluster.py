"""What the Python API decides before anything runs. The rest: end_to_end/test_python_api.py."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import Cluster, OrchestratorError
from orchestrator.api.cluster import as_arguments, merged
from orchestrator.api.options import Options
from orchestrator.api.pool import pickled
from orchestrator.node.job import run_function


def test_help_names_every_option() -> None:
    text = inspect.getdoc(Cluster) or ""
    for name in ("nodes", "ssh_config", "experiments", *Options.__annotations__):
        assert f"\n{name}: " in text, name


def test_later_options_win_one_by_one() -> None:
    first: Options = {"nproc": 2, "env": {"A": "1", "B": "1"}, "set": {"x.y": 1}}
    then: Options = {"nproc": 4, "env": {"B": "2"}, "config": "c.yaml", "workdir": Path("/w")}
    assert as_arguments(merged(first, then)) == [
        f"--config={Path('c.yaml').absolute()}",
        *("--set=launch.nproc=4", '--set=launch.workdir="/w"', "--set=x.y=1"),
        *("--env=A=1", "--env=B=2"),
    ]


async def asynchronous() -> None:
    """Would end as a coroutine that nobody awaits."""


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("Cluster(nprok=2)", "no option 'nprok'; did you mean 'nproc'"),
        ("Cluster().with_options(grase=2)", "did you mean 'grace'"),
        ("Cluster().launch('x', timeout=2)", "no option 'timeout'"),
        ("Cluster().launch('x', args='--a 1')", r"a list: args=\['--a', '1'\]"),
        ("Cluster().launch('x', module='y')", "which one"),
        ("Cluster().launch(args=['x'])", "the built-in engine takes no args"),
        ("Cluster().run('train.py')", r"'train.py' is no function(.|\n)*launch\('train.py'\)"),
        ("Cluster().submit(None)", "None is no function"),
        ("pickled(5, (), {})", "5 is no function"),
        ("Cluster().run(asynchronous)", "asynchronous is async(.|\n)*asyncio.run"),
        ("pickled(generator, (), {})", r"generator is a generator(.|\n)*list\(generator"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: str, words: str) -> None:
    with pytest.raises(OrchestratorError, match=words):
        eval(call, {**globals(), "Cluster": Cluster, "pickled": pickled})


def test_importing_it_is_light() -> None:
    code = "import sys; from orchestrator import Cluster, Job, Verdict; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "paramiko", "click", "yaml", "cloudpickle", "asyncio"}
    assert not heavy & set(done.stdout.split())
    import orchestrator

    with pytest.raises(AttributeError, match="no attribute 'Clutser'"):
        _ = orchestrator.Clutser
    assert (Path(orchestrator.__file__).parent / "py.typed").exists()


PROGRAM = """
import sys
from pathlib import Path
import beside
from orchestrator.api.cluster import pack

def work():
    import below
    return beside.NAME, below.NAME

pack(Path(sys.argv[1]), "work", (work, (), {}))
"""


def test_a_function_finds_the_modules_of_its_program(tmp_path: Path) -> None:
    """Those beside the script and those in the directory it is typed in, which has moved."""
    here, there, parcel = tmp_path / "here", tmp_path / "there", tmp_path / "run" / "parcel"
    for directory in (here / "tools", parcel):
        directory.mkdir(parents=True)
    (here / "tools" / "use.py").write_text(PROGRAM)
    (here / "tools" / "beside.py").write_text("NAME = 'beside'")
    (here / "below.py").write_text("NAME = 'below'")
    subprocess.run([sys.executable, "tools/use.py", parcel], cwd=here, check=True)
    here.rename(there)
    place = {"ORCHESTRATOR_RUN": str(parcel.parent), "ORCHESTRATOR_EXPERIMENT": str(tmp_path)}
    env = {**os.environ, **place, "RANK": "0"}
    subprocess.run([sys.executable, run_function.__file__], cwd=there, env=env, check=True)
    result = (tmp_path / "outputs" / "results" / "rank_0.pkl").read_bytes()
    assert pickle.loads(result) == ("beside", "below")
