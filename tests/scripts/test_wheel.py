"""The package as a wheel holds it, for those who have no clone."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cluster

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
PARTS = ("orchestrator", "config", "docs", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def run(*command: str, place: Path, library: Path | None = None) -> str:
    env = os.environ | ({"PYTHONPATH": str(library)} if library else {})
    done = subprocess.run(
        [sys.executable, *([] if command[0].startswith("-") else ["-m"]), *command],
        env=env,
        cwd=place,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def git(place: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(place), *names, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def setup_of(place: Path) -> dict[str, Any]:
    return runpy.run_path(str(place / "setup.py"), run_name="read")


def test_version_comes_from_git(tmp_path: Path) -> None:
    """Of a tag, of a commit, of an edit; in a shallow clone, and where there is no git."""
    first, plain = tmp_path / "first", tmp_path / "plain"
    version = "orchestrator/common/version.py"
    for place in (first, plain):
        (place / version).parent.mkdir(parents=True)
        (place / version).write_text('__version__ = "3.4.0.dev0"\n')
        shutil.copy(ROOT / "setup.py", place)
    git(first, "init", "-q")
    git(first, "add", ".")
    git(first, "commit", "-qm", "one")
    git(first, "commit", "-qm", "two", "--allow-empty")
    commit = git(first, "rev-parse", "--short=9", "HEAD")
    assert setup_of(first)["VERSION"] == f"3.4.0.dev0+g{commit}"
    git(tmp_path, "clone", "-q", "--depth=1", "--no-tags", f"file://{first}", "shallow")
    assert setup_of(tmp_path / "shallow")["VERSION"] == f"3.4.0.dev0+g{commit}"
    git(first, "tag", "v3.4.0")
    assert setup_of(first)["VERSION"] == "3.4.0"
    (first / "setup.py").write_text((first / "setup.py").read_text() + "\n")
    assert setup_of(first)["VERSION"] == f"3.4.0.dev0+g{commit}.edited"
    git(first, "commit", "-qam", "three")
    git(first, "tag", "v9.9")
    with pytest.raises(SystemExit, match=r"v9\.9 is on this commit, and .* leads to 3\.4\.0"):
        setup_of(first)
    assert setup_of(plain)["VERSION"] == "3.4.0.dev0"
    inside = first / "another"
    shutil.copytree(plain, inside)
    assert setup_of(inside)["VERSION"] == "3.4.0.dev0", "the commit is of what is around it"


def test_readme_of_wheel_has_no_relative_links() -> None:
    readme = setup_of(ROOT)["readme"]
    relative = re.compile(r"\]\((?!https?:|#)")
    assert relative.search((ROOT / "README.md").read_text()), "nothing to prove"
    assert not relative.search(readme("", "main"))
    text = readme("https://example.org/us/it", "v3")
    assert not relative.search(text)
    assert "](https://example.org/us/it/blob/v3/docs/" in text
    assert re.search(r"!\[[^\]]*\]\(https://example.org/us/it/raw/v3/docs/", text)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A clone with one commit, and the wheel of it."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, source)
    git(source, "init", "-q")
    path = source / "orchestrator/common/version.py"
    path.write_text('__version__ = "3.4.0.dev0"\n')
    git(source, "add", ".")
    git(source, "commit", "-qm", "one")
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    run("pip", "wheel", *options, "--wheel-dir", str(place), str(source), place=place)
    (wheel,) = place.glob("master_launch-*.whl")
    return source, wheel


def test_wheel_contains_everything_used(packed: tuple[Path, Path], tmp_path: Path) -> None:
    (source, wheel), library = packed, tmp_path / "library"
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if name.startswith("orchestrator/")}
        file.extractall(library)
    version = wheel.name.split("-")[1].replace("_", "+", 1)
    assert version == f"3.4.0.dev0+g{git(source, 'rev-parse', '--short=9', 'HEAD')}"
    (told,) = library.glob("*.dist-info/METADATA")
    metadata = Parser().parsestr(told.read_text())
    assert metadata["Version"] == version
    # No address of the project is known: none is shown, and no blank in its place.
    links = [words.split(", ")[-1] for words in metadata.get_all("Project-URL", [])]
    links += metadata.get_all("Home-page", [])
    assert all(link.startswith("https://") for link in links)
    assert not re.search(r"\]\((?!https?:|#)", metadata.get_payload())
    front = "from orchestrator import __version__ as v; print(v)"
    for command in (["orchestrator", "--version"], ["-c", front]):
        assert run(*command, place=tmp_path, library=library).split()[-1] == version
    assert inside == {
        os.path.relpath(Path(directory) / name, source)
        for directory, _, names in os.walk(source / "orchestrator", followlinks=True)
        for name in names
    }


# What README.md shows, and what is typed for it in an environment that has the wheel alone. What
# needs a person, a network or a minute, or does what another line does, shows its help. `&`: beside
# others, when a job has ended.
TYPED = {
    "uvx master-launch demo --kill": "& master-launch demo --size 1 -- --no-torchrun train.py",
    "uv tool install master-launch": "",  # the wheel is installed
    "pipx install master-launch": "",
    "pip install master-launch": "",
    "orchestrator init": "orchestrator init {hosts} --yes",
    "cat node_ip_list.txt": "",
    "./scripts/demo.sh": "& orchestrator demo --dry-run",  # a clone's two; each has its own test
    "./scripts/test.sh": "",
    "make docs": "",
    "orchestrator bootstrap torch numpy": "& orchestrator bootstrap --help",
    "master_launch --dry-run train.py --epochs 3": "& master_launch --help",
    "master_launch train.py --epochs 3": "master_launch --no-torchrun train.py --epochs 3",
    "master_launch --warm train.py": "& master_launch --help --all",
    "master_launch": "& master_launch --dry-run",
    "orchestrator nodes": "& orchestrator nodes",
    "orchestrator nodes --queue": "& orchestrator nodes --help",
    "orchestrator sweep --grid lr=1e-4,3e-4": "& orchestrator sweep --help",
    "orchestrator top": "& orchestrator top --once",
    "orchestrator plan --explain SCRIPT": "& orchestrator plan --help",
    "orchestrator doctor": "& orchestrator doctor --quick",
    "orchestrator verify": "& orchestrator verify --help",
    "orchestrator ls": "& orchestrator ls",
    "status": "& orchestrator status",
    "orchestrator attach": "& orchestrator attach --help",
    "logs -f": "& orchestrator logs -f",
    "orchestrator stop": "& orchestrator stop",
    "emergency_stop": "& emergency_stop --help",  # others' jobs run on this machine
    "orchestrator report": "& orchestrator report",
    "dashboard": "& orchestrator dashboard --help",
    "orchestrator profile": "& orchestrator profile --help",
    "orchestrator track": "& orchestrator track --help",
    "orchestrator rerun EXP": "& orchestrator rerun --help",
    "orchestrator exec -- CMD": "& orchestrator exec -- true",
    "ssh 3": "& orchestrator ssh --help",
    "orchestrator push SRC": "& orchestrator push train.py /tmp/ --dry-run",
    "pull EXP": "& orchestrator pull {experiment}",
    "orchestrator prune --keep 20": "& orchestrator prune --keep 20 --yes",
}


def shown_in_the_readme() -> set[str]:
    """The commands of its blocks, and those in the first column of its table of commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    typed = {re.sub(r"^\$ |\s+#.*$", "", line) for line in lines if re.match(r"\$ |\./", line)}
    table = text.partition("| command | does |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    return typed | {"make docs"} | {word for cell in cells for word in re.findall("`(.+?)`", cell)}


def test_readme_commands_work_from_wheel(
    packed: tuple[Path, Path],
    tmp_path: Path,
    loopback_cluster: Callable[..., Cluster],
) -> None:
    assert shown_in_the_readme() <= set(TYPED)
    venv, work, hosts = tmp_path / "venv", tmp_path / "work", loopback_cluster(2)
    work.mkdir()
    command = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    subprocess.run(command, check=True)
    (site,) = venv.glob("lib/python3*/site-packages")
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--quiet"]
    into = ["--python", str(venv / "bin/python")]
    run("pip", *into, "install", *options, str(packed[1]), place=work)
    # What the package needs of others comes from here; the package itself does not: no .pth of
    # this directory is read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (work / "train.py").write_text("import sys\nprint('trained', *sys.argv[1:])\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PATH": f"{venv}/bin:{env['PATH']}", "ORCHESTRATOR_SSH_CONFIG": str(hosts.ssh_config)}

    def start(line: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            shlex.split(line), cwd=work, env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    made, said = ended(start(TYPED["orchestrator init"].format(hosts=" ".join(hosts.addresses))))
    last = said.splitlines()[-1].removeprefix("orchestrator: now type: ")
    assert made == 0 and last == "master_launch train.py", said
    code, said = ended(start(TYPED["master_launch train.py --epochs 3"]))
    assert code == 0 and said.count("| trained --epochs 3") == 2, said
    (experiment,) = [path.name for path in (work / "experiments").iterdir() if path.is_dir()]
    beside = [line[2:].format(experiment=experiment) for line in TYPED.values() if line[:1] == "&"]
    with ThreadPoolExecutor(4) as pool:
        for line, process, text in pool.map(lambda line: (line, *ended(start(line))), beside):
            assert process == 0, f"{line}: {text}"

    board = start("orchestrator dashboard --port 0")
    assert board.stdout is not None
    address = board.stdout.readline().partition("open ")[2].strip()
    with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(address) as page:
        assert b"refresh" in page.read()
    board.terminate()
    board.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    text = process.communicate()[0]
    return process.returncode, text
