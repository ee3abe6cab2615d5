"""scripts/examples: each script as its page says, on two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import Head

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
PAGES = {
    "multi_node_example.py": "torchrun",
    "test_multinode.py": "accelerate",
    "distributed_training_example.py": "ddp-trainer",
    "train_distributed_example.py": "slurm",
}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "options", "words", "last"),
    [
        (
            *("multi_node_example.py", [], ["--min-period", "1s", "--max-period", "2s"]),
            "Gathered 2 tensors, their mean is 0.5",
        ),
        (
            *("test_multinode.py", ["--accelerate-config", "accelerate.yaml"], []),
            "Multi-node setup successful!",
        ),
        (
            *("distributed_training_example.py", [], ["--epochs", "2"]),
            "Metrics over 2 processes: {",
        ),
        (
            *("train_distributed_example.py", [], ["--epochs", "2"]),
            "Training completed successfully!",
        ),
    ],
)
def test_an_example_runs_on_two_nodes(
    head: Head, name: str, options: list[str], words: list[str], last: str
) -> None:
    """Named by its path in the clone, which all hosts of these tests share."""
    (head.directory / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n"
    )
    command = head.run(*options, str(EXAMPLES / name), *words)
    assert last in command.text


def test_each_example_is_named_by_its_page_and_there_are_no_others() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PAGES)
    for name, page in PAGES.items():
        text = (ROOT / "docs" / "coming-from" / f"{page}.md").read_text(encoding="utf-8")
        assert f"scripts/examples/{name}" in text
