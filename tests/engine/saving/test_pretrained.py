"""Weights from safetensors: each rank reads its rows, and no rank ever holds a whole model."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

from orchestrator.common.errors import OrchestratorError
from orchestrator.engine.saving import weights
from tests.engine.core.test_parity import config
from tests.engine.programs import configured as own
from tests.engine.programs.large import BLOCKS, WIDTH
from tests.engine.worlds import PROGRAMS, Job, run

pytestmark = pytest.mark.slow

WHOLE = BLOCKS * WIDTH * WIDTH * 4  # bytes


@pytest.mark.parametrize("nodes", [[2], [1]])
def test_sharded_load_never_holds_whole_model(tmp_path: Path, nodes: list[int]) -> None:
    job = Job(str(tmp_path / "job"), nodes, {}, call=f"{PROGRAMS}.large:sharded_from_files")
    (codes,) = run(job)
    assert codes == [0] * sum(nodes), job.output()
    for rank in range(sum(nodes)):
        results = json.loads((job.path / f"results_{rank}").read_text())
        assert results["right"]
        assert results["shift"] == [2.0] * 3
        assert max(results["same"]) < 1e-6
        for said, words in zip(
            results["refused"],
            ("name a file: weights=", "lacks 1 of the model's tensors, such as bias",
             "weight has the shape (3, 5)", "no.safetensors cannot be read: ",
             "absent.safetensors cannot be read: "),
            strict=True,
        ):  # fmt: skip
            assert words in said
        # Its own part, and what two blocks and the allocator take.
        assert results["taken"] < WHOLE / sum(nodes) + WHOLE / 4


def test_target_model_on_meta_device_is_loaded(tmp_path: Path) -> None:
    """Made on the meta device or not, it begins with the same weights; without a file, never."""
    file = tmp_path / "model.safetensors"
    save_file(own.model().state_dict(), file)

    def job(function: str, **more: str) -> Job:
        model = {"model": {"target": f"tests.engine.programs.configured:{function}", **more}}
        short = {"training": {"max_steps": 2}}
        return Job(str(tmp_path / f"{function}{len(more)}"), [2], config(short, model, world=2))

    jobs = [job("model", weights=str(file)), job("without_memory", weights=str(file))]
    refused = job("without_memory")
    assert run(*jobs, refused) == [[0, 0], [0, 0], [1, 1]], refused.output()
    first, second = ([line["loss"] for line in one.metrics()] for one in jobs)
    assert first == second
    assert "(model.weights); or make it on the CPU" in refused.output()


# -- files that are damaged, or not what they are taken for ---------------------------------------


def saved(directory: Path) -> Path:
    path = directory / "model.safetensors"
    save_file(nn.Linear(3, 2).state_dict(), path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(OrchestratorError) as raised:
        weights.load_weights(nn.Linear(3, 2), path)
    return str(raised.value)


@pytest.mark.parametrize("keep", [0, 7, 30, -1])
def test_unreadable_weights_file_is_named(tmp_path: Path, keep: int) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path} cannot be read: " in refused(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 1}', "\xff", "[" * 9999])
def test_unreadable_index_is_named(tmp_path: Path, text: str) -> None:
    saved(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text, encoding="latin-1")
    assert f"{index} cannot be read: " in refused(tmp_path)
    index.write_text('{"weight_map": {"weight": "gone.safetensors"}}')
    assert "gone.safetensors cannot be read: No such file" in refused(tmp_path)
