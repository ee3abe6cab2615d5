"""A checkpoint that several ranks wrote becomes one safetensors file, which others can read."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from orchestrator.common.errors import CheckFailed, JobFailed, UsageError
from orchestrator.config.launch import Where
from orchestrator.engine import export
from orchestrator.engine.sharding.copies import DTYPES
from orchestrator.head.commands import checkpoints
from orchestrator.records import checkpoint_store
from tests.engine.worlds import Job, run
from tests.records.test_checkpoint_store import publish
from tests.typed import typed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # no_dist

WHOLE = {
    # The ranks have 4, 4 and 2 rows.
    "rows": torch.arange(40.0).reshape(10, 4) / 3,
    "columns": torch.arange(28.0, dtype=torch.float64).reshape(4, 7) / 7,
    # The third rank has no rows of it.
    "few": torch.tensor([1.5, -2.5]),
    "copied.weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "half": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "scale": torch.tensor(0.1),
    "none": torch.empty(0, 4),
    "odd ü\n": torch.tensor([7], dtype=torch.uint8),
    "ids": torch.arange(3),
    "mask": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j]),
}


def published(directory: Path, step: int, progress: Any = None) -> Path:
    place = checkpoint_store.partial_path(directory, step, "run")
    files = {path.name: checkpoint_store.describe_file(path) for path in place.iterdir()}
    return publish(place, directory, step, progress, 3, files)


def save(directory: Path, step: int, state: dict[str, Any], progress: Any = None) -> Path:
    """By one rank."""
    place = checkpoint_store.partial_path(directory, step, "run")
    directory.mkdir(exist_ok=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place), no_dist=True)
    return published(directory, step, progress)


def save_shards(directory: Path) -> None:
    """Save the tensors of WHOLE, some of them as shards of this rank and the others."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"model." + name: value for name, value in WHOLE.items()}
    for name, dim in (("rows", 0), ("columns", 1), ("few", 0)):
        state["model." + name] = distribute_tensor(WHOLE[name], mesh, [Shard(dim)])
    state["optim.rows.exp_avg"] = torch.ones(100, 4)
    state["model.extra_state"] = {"no": "tensor"}
    place = checkpoint_store.partial_path(directory, 120, "run")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place, single_file_per_rank=True))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def of_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    job = Job(str(directory), [3], {}, call=f"{__name__}:save_shards")
    assert run(job) == [[0] * 3], job.output()
    return published(directory, 120)


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.slow
def test_export_is_readable_by_safetensors(of_three_ranks: Path, tmp_path: Path) -> None:
    export.export_weights(of_three_ranks, tmp_path / "out")
    found = load_file(tmp_path / "out")
    assert set(found) == set(WHOLE)
    for name, value in WHOLE.items():
        assert same(found[name], value), name
    with safe_open(tmp_path / "out", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "120"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_export_converts_floating_point_alone(
    of_three_ranks: Path, tmp_path: Path, name: str
) -> None:
    export.export_weights(of_three_ranks, tmp_path / "out", name)
    found = load_file(tmp_path / "out")
    for key, value in WHOLE.items():
        floating = value.dtype.is_floating_point
        assert same(found[key], value.to(DTYPES[name]) if floating else value), key


def test_export_refuses_values_beyond_fp16(tmp_path: Path) -> None:
    directory = save(tmp_path / "checkpoints", 1, {"model.big": torch.tensor([1.0, 70_000.0])})
    with pytest.raises(UsageError, match=r"model\.big has values above 65504"):
        export.export_weights(directory, tmp_path / "out", "fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    export.export_weights(directory, tmp_path / "out", "bf16")


def flip(directory: Path) -> None:
    file = next(iter(sorted(directory.glob("__*"))))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_export_refuses_damaged_checkpoint(tmp_path: Path) -> None:
    directory = save(tmp_path / "checkpoints", 1, {"model.a": torch.ones(100)})
    flip(directory)
    with pytest.raises(CheckFailed, match=r"is damaged: its sha256"):
        export.export_weights(directory, tmp_path / "out")
    (directory / ".metadata").unlink()
    with pytest.raises(CheckFailed, match=r"\.metadata is missing"):
        export.export_weights(directory, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_export_refuses_checkpoint_without_weights(tmp_path: Path) -> None:
    directory = save(tmp_path / "checkpoints", 1, {"optim.a": torch.ones(1)})
    with pytest.raises(JobFailed, match="nothing in it is called model"):
        export.export_weights(directory, tmp_path / "out")


def test_export_replaces_file_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(tmp_path / "checkpoints", 1, {"model.a": torch.ones(1)})
    out = tmp_path / "out"
    out.write_text("precious")
    with pytest.raises(UsageError, match="already exists"):
        export.export_weights(directory, out)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(JobFailed, match="No space left on device"):
            export.export_weights(directory, out, force=True)
    assert out.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]
    export.export_weights(directory, out, force=True)
    assert same(load_file(out)["a"], torch.ones(1))


@pytest.mark.parametrize("out", ["", "none/out"])
def test_export_refuses_unwritable_place(tmp_path: Path, out: str) -> None:
    with pytest.raises(UsageError, match=r"is a directory|does not exist"):
        export.export_weights(tmp_path, tmp_path / out)


def test_export_writes_directory_for_from_pretrained(tmp_path: Path) -> None:
    state = {f"model.{name}": torch.full((4,), float(i)) for i, name in enumerate("abc")}
    configs = {"config.json": '{"dtype": "float32", "width": 4}', "generation_config.json": "{}"}
    progress = {"aliases": {"d": "a"}, "configs": configs}
    directory = save(tmp_path / "checkpoints", 1, state, progress)
    out = tmp_path / "out"
    out.mkdir()
    report = export.export_weights(directory, out, layout="huggingface")
    size = (out / "model.safetensors").stat().st_size
    assert report == f"step 1: 4 tensors, {size:,} bytes: {out}"
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert (out / "config.json").read_text() == configs["config.json"]
    assert load_file(out / "model.safetensors").keys() == set("abcd")

    with pytest.raises(UsageError, match="already exists"):
        export.export_weights(directory, out, layout="huggingface")
    (out / "tokenizer.json").write_text("the user's own")
    (out / "model-00001-of-00002.safetensors").write_text("of an earlier export")
    export.export_weights(directory, out, "bf16", force=True, layout="huggingface")
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "tokenizer.json"])
    assert (out / "config.json").read_text() == configs["config.json"]
    found = load_file(out / "model.safetensors")
    assert all(same(found[name], state[f"model.{name}"].bfloat16()) for name in "abc")
    assert same(found["d"], found["a"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_export_without_config_writes_weights_alone(tmp_path: Path) -> None:
    directory = save(tmp_path / "checkpoints", 1, {"model.a": torch.ones(1)})
    report = export.export_weights(directory, tmp_path / "out", layout="huggingface")
    assert "without config.json: the checkpoint has none" in report
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "configs",
    [
        {"../config.json": "{}"},
        {"/tmp/config.json": "{}"},
        {"model.safetensors": "{}"},
        {"model.safetensors.index.json": "{}"},
        {".bashrc": "x"},
        {"config.json": 1},
        ["config.json"],
    ],
    ids=str,
)
def test_export_refuses_damaged_config(tmp_path: Path, configs: Any) -> None:
    place = save(tmp_path / "checkpoints", 1, {"model.a": torch.ones(1)}, {"configs": configs})
    with pytest.raises(JobFailed, match="its copy of the model's config is damaged"):
        export.export_weights(place, tmp_path / "out", "bf16", layout="huggingface")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


# -- the command ------------------------------------------------------------------------------


def export_of(directory: Path, dtype: str | None = None) -> int:
    where, out = Where(experiments=directory), directory.parent / "o ut.safetensors"
    return checkpoints.export_weights(where, str(directory), out, None, dtype, "file", force=False)


def fork(words: list[str], cwd: Path, *, check: bool) -> subprocess.CompletedProcess[str]:
    """Run the module that a new Python would run, in a fork of this one."""
    assert words[:3] == [sys.executable, "-m", "orchestrator.engine.export"] and not check
    code, out, err = typed(words[3:], cwd, lambda: sys.exit(export.main()))
    sys.stdout.write(out)
    sys.stderr.write(err)
    return subprocess.CompletedProcess(words, code)


@pytest.mark.slow
def test_export_falls_back_to_newest_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        save(tmp_path / "checkpoints", step, {"model.a": torch.tensor(float(step))})
    flip(tmp_path / "checkpoints" / "step_00000003")
    monkeypatch.setattr(subprocess, "run", fork)
    assert export_of(tmp_path / "checkpoints", "bf16") == 0
    said = capsys.readouterr()
    assert "step_00000003 is not exported" in said.err
    assert "trying the one before it, of step 2" in said.err
    assert said.out.startswith("step 2: 1 tensor, ")
    found = load_file(tmp_path / "o ut.safetensors")
    assert same(found["a"], torch.tensor(2.0, dtype=torch.bfloat16))


def test_killed_export_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "checkpoints", 1, {"model.a": torch.ones(1)})
    died = subprocess.CompletedProcess[bytes]([], -9)
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: died)
    with pytest.raises(JobFailed, match="killed by signal 9"):
        export_of(tmp_path / "checkpoints")
