"""Checks of the Python API before anything runs. Runs are in end_to_end/test_python_api.py."""

import inspect
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator import Cluster, OrchestratorError
from orchestrator.api import head_process
from orchestrator.api.cluster import OPTIONS, launch_arguments, merge_options
from orchestrator.common.errors import UsageError
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.background.process import Background
from orchestrator.node.job.ranks import run_function


def test_help_names_every_option() -> None:
    text = inspect.getdoc(Cluster) or ""
    for name in ("nodes", "ssh_config", "experiments", *OPTIONS):
        assert f"\n{name}: " in text, name


def test_merged_options_override_one_by_one() -> None:
    first = {"nproc": 2, "env": {"A": "1", "B": "1"}, "set": {"x.y": 1}}
    then = {"nproc": 4, "env": {"B": "2"}, "config": "c.yaml", "workdir": Path("/w")}
    given = launch_arguments(Where(), merge_options(first, then))
    assert given.config_file == Path("c.yaml").absolute()
    assert given.overrides == ("launch.nproc=4", 'launch.workdir="/w"', "x.y=1")
    assert given.env == ("A=1", "B=2")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("Cluster(nprok=2)", "no option 'nprok'; did you mean 'nproc'"),
        ("Cluster().with_options(grase=2)", "did you mean 'grace'"),
        ("Cluster().launch('x', timeout=2)", "no option 'timeout'"),
        ("Cluster().launch('x', args='--a 1')", r"a list: args=\['--a', '1'\]"),
        ("Cluster().launch('x', module='y')", "pass either a script or module=, not both"),
        ("Cluster().launch(args=['x'])", "the built-in engine takes no args"),
        ("Cluster().run('train.py')", r"'train.py' is not a function(.|\n)*launch\('train.py'\)"),
        ("Cluster().submit(None)", "None is not a function"),
        ("Cluster().run(5)", "5 is not a function"),
    ],
)
def test_invalid_arguments_are_refused(call: str, words: str) -> None:
    with pytest.raises(OrchestratorError, match=words):
        eval(call, {**globals(), "Cluster": Cluster})


def test_import_is_light() -> None:
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
sys.path.append("tools/packed.zip")
import beside, packed
from orchestrator.api.cluster import pack

def work():
    import below
    return beside.NAME, below.NAME, packed.NAME

pack(Path(sys.argv[1]), "work", (work, (), {}), Path.cwd())
"""


def test_pickled_function_finds_its_modules(tmp_path: Path) -> None:
    """Those beside the script, in the directory it is typed in, and in a zip; all have moved."""
    here, there, parcel = tmp_path / "here", tmp_path / "there", tmp_path / "part" / "payload"
    for directory in (here / "tools", parcel):
        directory.mkdir(parents=True)
    (here / "tools" / "use.py").write_text(PROGRAM)
    (here / "tools" / "beside.py").write_text("NAME = 'beside'")
    (here / "below.py").write_text("NAME = 'below'")
    with zipfile.ZipFile(here / "tools" / "packed.zip", "w") as archive:
        archive.writestr("packed.py", "NAME = 'packed'")
    subprocess.run([sys.executable, "tools/use.py", parcel], cwd=here, check=True)
    here.rename(there)
    place = {"ORCHESTRATOR_RUN": str(parcel.parent / "1"), "ORCHESTRATOR_EXPERIMENT": str(tmp_path)}
    env = {**os.environ, **place, "RANK": "0"}
    subprocess.run([sys.executable, run_function.__file__], cwd=there, env=env, check=True)
    result = (tmp_path / "outputs" / "results" / "rank_0.pkl").read_bytes()
    assert pickle.loads(result) == ("beside", "below", "packed")


def test_removed_working_directory_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    cluster = Cluster()
    gone.rmdir()
    for asks in (Cluster, cluster.nodes, lambda: cluster.run(abs, 1)):
        with pytest.raises(UsageError, match="directory was removed"):
            asks()


def test_environment_variables_set_nodes_and_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "few.txt").write_text("one.invalid\n")
    monkeypatch.setenv("ORCHESTRATOR_NODES", str(tmp_path / "few.txt"))
    monkeypatch.setenv("ORCHESTRATOR_SSH_CONFIG", str(tmp_path / "no_config"))
    assert repr(Cluster()) == f"<Cluster {tmp_path / 'few.txt'}>"
    assert repr(Cluster(tmp_path / "other.txt")) == f"<Cluster {tmp_path / 'other.txt'}>"
    with pytest.raises(UsageError, match="no_config"):
        Cluster().nodes()
    own = tmp_path / "own_config"
    with pytest.raises(UsageError, match="own_config"):
        Cluster(ssh_config=own).nodes()


def test_forked_process_closes_background_pipes(tmp_path: Path) -> None:
    where = Where(nodes=tmp_path / "none")
    head = Background(head_process.describe_nodes, arguments=LaunchArguments(where=where))
    if not (child := os.fork()):
        os._exit(0 if head.keys.closed and head.answers.closed and head.gone() else 1)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(UsageError, match="no node list"):
        head.answer()
