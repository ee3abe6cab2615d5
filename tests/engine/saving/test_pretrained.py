"""Weights from safetensors: each rank reads its rows, and no rank ever holds a whole model."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from orchestrator.common.errors import OrchestratorError
from orchestrator.engine.saving import pretrained
from tests.engine.core.test_parity import config
from tests.engine.programs import configured as own
from tests.engine.programs.large import BLOCKS, WIDTH
from tests.engine.worlds import PROGRAMS, Job, run

pytestmark = pytest.mark.slow

WHOLE = BLOCKS * WIDTH * WIDTH * 4  # bytes


@pytest.mark.parametrize("nodes", [[2], [1]])
def test_a_model_is_never_whole_on_a_rank(tmp_path: Path, nodes: list[int]) -> None:
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
            ("say where they are: weights=", "lacks 1 of the model's tensors, such as bias",
             "weight has the shape (3, 5)", "is not a safetensors file", "cannot be read"),
            strict=True,
        ):  # fmt: skip
            assert words in said
        # Its own part, and what two blocks and the allocator take.
        assert results["taken"] < WHOLE / sum(nodes) + WHOLE / 4


def test_a_models_function_may_leave_its_memory_to_the_engine(tmp_path: Path) -> None:
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
    assert "name a file with its weights: model.weights" in refused.output()


# -- files that are damaged, or not what they are taken for ---------------------------------------


def saved(directory: Path) -> Path:
    path = directory / "model.safetensors"
    save_file(nn.Linear(3, 2).state_dict(), path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(OrchestratorError) as raised:
        pretrained.load(nn.Linear(3, 2), path)
    return str(raised.value)


def with_header(path: Path, before: str, after: str) -> Path:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + size].replace(before.encode(), after.encode())
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    return path


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert f"is cut off: its header names {len(content)} bytes, and it has" in refused(path)
    assert "as F8_E8M0, which this program cannot read" in refused(
        with_header(saved(tmp_path), "F32", "F8_E8M0")
    )
    for before, after in (("[2,3]", "[2,4]"), ("[2,3]", '"2,3"'), ('"shape"', '"shade"')):
        assert "is damaged" in refused(with_header(saved(tmp_path), before, after)), after


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"weight": 1}}', "\xff", "[" * 9999],
)
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    saved(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text, encoding="latin-1")
    assert f"{index} is damaged" in refused(tmp_path)
    index.write_text('{"weight_map": {"weight": "gone.safetensors"}}')
    assert "gone.safetensors cannot be read: No such file" in refused(tmp_path)


@given(st.data())
def test_any_damage_ends_in_a_sentence(data: st.DataObject) -> None:
    """Cut off, or with other bytes in its header: it is read, or refused in words."""
    with tempfile.TemporaryDirectory() as directory:
        path = saved(Path(directory))
        content = bytearray(path.read_bytes())
        size = 8 + int.from_bytes(content[:8], "little")
        for index, byte in data.draw(
            st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 255)), max_size=4)
        ):
            content[index] = byte
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            pretrained.load(nn.Linear(3, 2), path)
        except OrchestratorError as error:
            assert "model.safetensors" in str(error)
