"""What a program will lack on the nodes, by its source: which guesses are made, and which not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.head.plan import dry_run
from orchestrator.head.plan.model import Foreseen, Target
from orchestrator.head.plan.source import foreseen
from orchestrator.head.plan.source.foreseen import Sent
from orchestrator.head.plan.source.program import read
from tests.head.plan.test_plan import found

HAVE = ("torch", "numpy", "os", "sys", "argparse", "pathlib", "json", "typing", "contextlib")


def guess(here: Path, program: str, *arguments: str, kind: str = "auto") -> Foreseen:
    """Foresee a program on two nodes that are sent all files here, and have no others."""
    source = read(Target(kind, program, arguments), here)
    missing = tuple(name for name in foreseen.modules_of(source) if name not in HAVE)
    nodes = found("a\nb", missing_modules=missing, missing_paths=foreseen.paths_of(source))
    files = [os.fsencode(path.relative_to(here)) for path in here.rglob("*") if path.is_file()]
    return foreseen.foresee(source, nodes, Sent.of(files, ["a", "b"]), here)


def names(result: Foreseen, what: str) -> list[str]:
    return [guess.name for guess in result.guesses if guess.what == what]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_imports_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "util/__init__.py", "import einops\n")
    write(
        tmp_path / "util/log.py", "from . import other\nif __name__ == '__main__':\n import bs4\n"
    )
    write(tmp_path / "util/other.py", "import yaml.nodes\n")
    write(
        tmp_path / "train.py",
        """
import os, torch, cv2
from typing import TYPE_CHECKING
from util import log
if TYPE_CHECKING:
    import pandas
try:
    import apex
except ImportError:
    apex = None
try:
    import timm
except ImportError as error:
    raise SystemExit("install timm") from error
def main():
    import wandb
if __name__ == "__main__":
    import tqdm
""",
    )
    result = guess(tmp_path, "train.py")
    certain = {guess.name for guess in result.guesses if guess.certain}
    assert certain == {"cv2", "einops", "yaml", "timm", "tqdm"}
    assert {guess.name for guess in result.guesses if not guess.certain} == {"wandb"}
    assert [(g.file, g.line) for g in result.guesses if g.name == "yaml"] == [("util/other.py", 1)]
    assert result.fixes[0].startswith("orchestrator bootstrap torch==2.")
    assert result.fixes[1] == "if it gets there, with these, too: wandb"
    for package in ("opencv-python-headless", "pyyaml", "einops", "timm", "tqdm"):
        assert f" {package}" in result.fixes[0]
    assert "numpy" not in result.fixes[0] and "pandas" not in result.fixes[0]
    assert "-m pip install" in result.fixes[2]
    text = "\n".join(dry_run.foreseen_lines(result))
    assert "by the source of train.py and 3 modules of its own (a guess" in text
    assert "  imports wandb (train.py:16, if it gets there): no node has it" in text


def test_paths_that_are_read_and_not_there(tmp_path: Path) -> None:
    write(tmp_path / "conf/a.json", "{}")
    write(
        tmp_path / "train.py",
        """
import argparse, os, json, numpy as np
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data/here")
parser.add_argument("--out", default="runs")
args = parser.parse_args()
dataset = "wiki"
folder = os.path.join("data", dataset)
config = json.load(open("conf/a.json"))
own = json.load(open(Path(__file__).parent / "conf" / "a.json"))
x = np.memmap(os.path.join(folder, "train.bin"), mode="r")
y = np.load(os.path.join(folder, "val.npy"))
z = open(f"{args.data}/labels.txt").read()
if os.path.exists("last.pt"):
    np.load("last.pt")
try:
    open("cache.bin", "rb")
except OSError:
    pass
os.makedirs(args.out, exist_ok=True)
open(os.path.join(args.out, "log.txt")).read()
w = np.load("/data/global.npy")
for name in os.listdir(unknown()):
    open(name)
""",
    )
    result = guess(tmp_path, "train.py")
    assert names(result, "reads") == [
        "data/wiki/train.bin",
        "data/here/labels.txt",
        "/data/global.npy",
    ]
    typed = guess(tmp_path, "train.py", "--dataset=books", "--data", "conf")
    assert names(typed, "reads")[:2] == ["data/books/train.bin", "conf/labels.txt"]
    assert not names(result, "writes")


def test_a_file_that_is_here_and_does_not_travel(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import torch\ntorch.load('model.pt')\n")
    write(tmp_path / "model.pt", "")
    source = read(Target("auto", "train.py", ()), tmp_path)
    nodes = found("a", missing_paths=("model.pt",))
    (only,) = foreseen.foresee(source, nodes, Sent.of([b"train.py"], ["a"]), tmp_path).guesses
    assert only.why == "it is here and does not travel; --set 'sync.include=[model.pt]' sends it"
    has = found("a")  # in the directory of that path, which is linked in
    assert not foreseen.foresee(source, has, Sent.of([b"train.py"], ["a"]), tmp_path).guesses
    assert foreseen.foresee(source, nodes, Sent(), tmp_path).guesses[0].why == "it is not there"


def test_writes_that_do_not_come_home(tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        """
import os, torch
from torchvision import datasets
save_dir = "../../../../outputs"
os.makedirs(save_dir, exist_ok=True)
torch.save({}, os.path.join(save_dir, f"step_{step}.pt"))
torch.save({}, "here/model.pt")
open("/scratch/log.txt", "w")
open("/dev/null", "w")
datasets.MNIST("../data", download=True)
Trainer(output_dir="~/runs")
place = Path("../../../../runs")
place = place / args.name
torch.save({}, place / "model.pt")
torch.save({}, "../../../near/model.pt")
parser = argparse.ArgumentParser()
parser.add_argument("--logs", type=Path, default=Path("/scratch") / "logs")
args = parser.parse_args()
args.logs.mkdir()
a = parser.parse_args()
a.logs.joinpath("of_a").mkdir()
b.logs.joinpath("of_b").mkdir()
parser.add_argument("--log", default="/log/run.log")
os.makedirs(os.path.dirname(a.log))
(Path.home() / "best").mkdir()
open(os.environ.get("OUT", "/out/x"), "w")
TrainingArguments("/scratch/hf")
open("runs/.hydra/config.yaml", "w")
open("runs/.cache/x", "w")
""",
    )
    result = guess(tmp_path, "train.py", "--output_dir", "/typed")
    assert names(result, "writes") == [
        *("/typed", "../../../../outputs", "/scratch/log.txt", "~/runs", "../../../../runs"),
        *("/scratch/logs", "/log", "~/best", "/out/x", "/scratch/hf", "runs/.cache/x"),
    ]
    source = read(Target("auto", "train.py", ()), tmp_path)
    assert not foreseen.foresee(source, found("a"), Sent(), tmp_path).guesses  # a shared disk
    named = Sent.of([], [], ["a", "b"])  # workdir=, on disks of the nodes' own
    every = foreseen.foresee(source, found("a\nb"), named, tmp_path).guesses
    assert [guess.why for guess in every if guess.name == "here/model.pt"] == [
        "it stays on each node, in the directory that you have named"
    ]
    both = Sent.of([], ["a"], ["b"])
    every = foreseen.foresee(source, found("a\nb"), both, tmp_path).guesses
    assert {guess.why for guess in every if guess.name.startswith("here")} == {"it stays on b"}


def test_a_program_that_changes_its_directory_has_no_paths_to_guess(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import os\nos.chdir('/x')\nopen('data.txt')\n")
    assert not guess(tmp_path, "train.py").guesses


def test_a_package_that_is_here_and_not_found_is_given_a_path(tmp_path: Path) -> None:
    write(tmp_path / "src/pkg/__init__.py", "")
    write(tmp_path / "src/pkg/main.py", "import einops\n")
    result = guess(tmp_path, "pkg.main", kind="module")
    assert names(result, "imports") == ["pkg", "einops"]
    assert result.fixes[0].startswith("--env PYTHONPATH=src ")
    write(tmp_path / "train.py", "import sys\nsys.path.insert(0, 'src')\nimport pkg\n")
    assert not guess(tmp_path, "train.py").guesses


def test_requirements_that_are_here_are_named(tmp_path: Path) -> None:
    write(tmp_path / "requirements.txt", "torch>=2\neinops==0.8\n")
    write(tmp_path / "train.py", "import einops, yaml\n")
    assert (
        guess(tmp_path, "train.py")
        .fixes[0]
        .startswith("orchestrator bootstrap requirements.txt pyyaml ")
    )


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("train.py", b"def f(:\n", "line 1: invalid syntax"),
        ("train.py", b"x = '\xff'\n", "train.py"),
        ("train.py", b"\0", "train.py"),
        ("train.py", b"x = " + b"(" * 5000, "train.py"),
        ("train.py", b"x = " + b"-" * 100_000 + b"1\n", "train.py"),
        ("train.py", b"#" * (2 << 20), "too large"),
        ("train.py", "# -*- coding: latin-1 -*-\nx = '\xe9'\n".encode("latin-1"), ""),
        ("train.py", b"\xef\xbb\xbfimport os\r\n", ""),
        ("train.ipynb", b"{}", ""),
        ("run.sh", b"#!/bin/sh\ntorchrun x\n", ""),
        ("gone.py", None, ""),
        ("train.py", b"a0 = '1'\n" + b"".join(b"a%d = a%d + a%d\n" % (n, n - 1, n - 1)
                                              for n in range(1, 60)) + b"open(a59)\n", ""),
        ("train.py", b"open(" + b"'a' + " * 900 + b"'b')\n", ""),
    ],
)  # fmt: skip
def test_no_source_ends_a_dry_run(
    tmp_path: Path, name: str, content: bytes | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = guess(tmp_path, name)
    text = " ".join(result.problems)
    assert problem in text and bool(text) == bool(problem)


def test_modules_in_a_circle_end(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "import b\n")
    write(tmp_path / "b.py", "import a\nfrom a import *\n")
    assert set(guess(tmp_path, "a.py").files) == {"a.py", "b.py"}


def test_a_name_with_a_newline_is_no_command(tmp_path: Path) -> None:
    (tmp_path / "x\nreboot.py").write_text("import einops\n")
    lines = dry_run.foreseen_lines(guess(tmp_path, "x\nreboot.py"))
    assert lines and not any("\n" in line for line in lines)


def test_one_command_makes_an_environment_of_all_that_is_imported(tmp_path: Path) -> None:
    """Also of what nodes have now: the new environment is another one."""
    write(tmp_path / "own.py", "import yaml\n")
    write(tmp_path / "train.py", "import einops, own, orchestrator, os\ndef f():\n import wandb\n")
    orchestrator, bootstrap, torch, *packages = guess(tmp_path, "train.py").command.split()
    assert (orchestrator, bootstrap, torch[:7]) == ("orchestrator", "bootstrap", "torch==")
    assert sorted(packages) == ["einops", "numpy", "pyyaml"]  # numpy is what our engine needs
    write(tmp_path / "requirements.txt", "torch\npyyaml\nnumpy\n")
    assert guess(tmp_path, "train.py").command == "orchestrator bootstrap requirements.txt einops"
    assert not guess(tmp_path, "no_such.py").command
