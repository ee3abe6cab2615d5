"""The pages of docs/recipes: what each says to type is run on two nodes, each with its own disk.

Rank 0 is killed after it has printed a line, and before it has saved what the line tells of: the
next attempt has to print the same. What our own environment lacks is installed for these tests
alone, beside the torch that is here. DeepSpeed is not among it: on two cores without a GPU its 0.19
gave no result within 400 s, not even under torchrun alone.
"""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.launching import BIN, Head, missing_lines

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts/examples"
PACKAGES = ["hydra-core", "lightning", "transformers[torch]"]
# One program, importing included, may take this long on a busy machine.
SECONDS = 400.0
# The name of a page, and the beginning of the line after which rank 0 is killed.
RECIPES = {
    "accelerate": "epoch 6/",
    "ddp": "epoch 6/",
    "hf_trainer": "'epoch': '3.25'",
    "hydra": "step 80/",
    "lightning": "epoch 6/",
    "nanogpt": "iter 35: ",
    "trainer": "epoch 6 ",
}
# In the place of the program, which it runs: the command stays as the page has it.
KILLS = """
import os, runpy, signal, sys
class Watched:
    def __init__(self, file):
        self.file = file
    def write(self, text):
        self.file.write(text)
        if LINE in text:
            self.file.write("\\n")
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    def __getattr__(self, name):
        return getattr(self.file, name)
if os.environ["ORCHESTRATOR_ATTEMPT"] == "1":
    sys.stdout = Watched(sys.stdout)
here = os.path.dirname(os.path.abspath(__file__))
runpy.run_path(os.path.join(here, "moved.py"), run_name="__main__")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the packages, and with all that ours has; one for all workers."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "recipes"
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
            (packages,) = directory.glob("lib/python3*/site-packages")
            (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
            (directory / "constraints").write_text(f"torch=={version('torch')}\n")
            words = [sys.executable, "-m", "pip", "--python", f"{directory}/bin/python", "install"]
            words += ["-q", "--no-compile", "-c", f"{directory}/constraints", *PACKAGES]
            done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                pytest.skip(f"the packages cannot be installed: {done.stderr.strip()[-300:]}")
            (directory / "installed").touch()
    return f"{directory}/bin/python"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_continues_after_kill(apart: Head, python: str, name: str) -> None:
    page = ROOT / f"docs/recipes/{name}.md"
    (typed,) = re.findall(r"^```sh\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    shutil.copytree(
        EXAMPLES / ("nanoGPT" if name == "nanogpt" else ""), apart.directory, dirs_exist_ok=True
    )
    for place in apart.directory.glob("data/*"):
        # In the place of Shakespeare, which would have to be fetched.
        shutil.copy(place / "prepare.py", place / "input.txt")
    *before, launch = typed.replace("\\\n", "").splitlines()
    for line in before:
        subprocess.run(
            ["env", f"PATH={BIN}:{os.environ['PATH']}", "bash", "-c", line],
            cwd=apart.directory,
            check=True,
        )
    words = shlex.split(launch)[1:]
    program = apart.directory / next(word for word in words if word.endswith(".py"))
    program.rename(program.with_name("moved.py"))
    program.write_text(KILLS.replace("LINE", repr(RECIPES[name])))
    command = apart.launch("--python", python, *words)
    assert command.finish(SECONDS) == 0, command.text
    assert len(apart.record["attempts"]) == 2
    assert not missing_lines(page, command.text), command.text
    first, again = re.findall(rf"rank0 \| .*{re.escape(RECIPES[name])}.*", command.text)
    assert first == again or name == "nanogpt"
    assert apart.nothing_left()
