"""scripts/examples, and the program of docs/start.md: as their pages say, on two nodes."""

import hashlib
import re
from pathlib import Path

import pytest

from tests.launching import Head

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
START = ROOT / "docs" / "start.md"
PAGES = {
    "multi_node_example.py": "coming-from/torchrun",
    "test_multinode.py": "coming-from/accelerate",
    "distributed_training_example.py": "coming-from/ddp-trainer",
    "train_distributed_example.py": "coming-from/slurm",
    "accelerate_loop.py": "recipes/accelerate",
    "ddp.py": "recipes/ddp",
    "engine.yaml": "recipes/engine",
    "hf_trainer.py": "recipes/hf_trainer",
    "hydra_app": "recipes/hydra",
    "lightning_ddp.py": "recipes/lightning",
    "nanoGPT": "recipes/nanogpt",
    "trainer.py": "recipes/trainer",
}
# One after the other in the same ranks, as importing torch takes longer than any of them; in one
# process group, as ranks that meet again find the addresses of the first time.
ALL = f"""
import runpy, sys
from orchestrator import distributed
end, distributed.cleanup_distributed = distributed.cleanup_distributed, lambda: None
for name, words in (
    ("start.py", []),
    ("multi_node_example.py", ["--min-period", "1 steps", "--max-period", "1 epochs"]),
    ("distributed_training_example.py", ["--epochs", "2"]),
    ("train_distributed_example.py", ["--epochs", "2"]),
):
    sys.argv = [name, *words]
    place = "" if name == "start.py" else {str(EXAMPLES)!r} + "/"
    runpy.run_path(place + name, run_name="__main__")
end()
"""


@pytest.mark.cluster
def test_examples_run_on_two_nodes(head: Head) -> None:
    """Others: tests/launchers/test_accelerate.py, tests/end_to_end/test_recipes.py."""
    (start,) = re.findall(r"```python train.py\n(.*?)```", START.read_text(), re.DOTALL)
    head.script("start.py", start.replace("epochs=5", "epochs=1"))
    command = head.run("--nproc", "1", head.script("all.py", ALL))
    for last in (
        "dealt out to 2 ranks",
        "Gathered 2 tensors, their mean is 0.5",
        "Metrics over 2 processes: {",
        "Training completed successfully!",
    ):
        assert last in command.text


def test_every_example_is_named_by_its_page() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} - {"__pycache__"} == set(PAGES)
    for name, page in PAGES.items():
        text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
        assert f"scripts/examples/{name}" in text


def test_copy_of_nanogpt_is_unchanged() -> None:
    place = EXAMPLES / "nanoGPT"
    listed = re.findall(r"^([0-9a-f]{40})  (\S+)$", (place / "README.md").read_text(), re.M)
    for digest, name in listed:
        data = (place / name).read_bytes()
        assert hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == digest, name
    assert len(listed) == 6
