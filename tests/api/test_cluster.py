"""What the Python API decides before anything runs. The rest: end_to_end/test_python_api.py."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import Cluster, OrchestratorError
from orchestrator.api.cluster import as_arguments, merged
from orchestrator.api.options import Options
from orchestrator.api.pool import pickled


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
    ],
)
def test_what_cannot_be_meant_is_refused(call: str, words: str) -> None:
    with pytest.raises(OrchestratorError, match=words):
        eval(call, {"Cluster": Cluster, "pickled": pickled})


def test_importing_it_is_light() -> None:
    code = "import sys; from orchestrator import Cluster, Job, Verdict; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "paramiko", "click", "yaml", "cloudpickle", "asyncio"}
    assert not heavy & set(done.stdout.split())
    import orchestrator

    with pytest.raises(AttributeError, match="no attribute 'Clutser'"):
        _ = orchestrator.Clutser
    assert (Path(orchestrator.__file__).parent / "py.typed").exists()
