"""A key that is accepted is honoured: changing any field of the config changes what can be seen.

A new field fails here until the table below says what it changes, and how that is seen.
"""

import array
import copy
import dataclasses
import functools
import gzip
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from orchestrator.common.errors import UsageError
from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine import export
from orchestrator.engine.data import sources, tokens
from orchestrator.engine.models.losses import LossSums
from orchestrator.engine.ranks.ranks import Ranks
from tests.conftest import Cluster
from tests.engine.programs import configured as own
from tests.engine.worlds import Job, run
from tests.launching import BIN, Command, Head

pytestmark = pytest.mark.cluster

Sections = dict[str, Any]


def every_field() -> Iterator[str]:
    """Keys of launch: and sync: have tests where their options have them."""
    for section, kind in typing.get_type_hints(Config).items():
        if section in ("launch", "sync"):
            continue
        if dataclasses.is_dataclass(kind):
            yield from (f"{section}.{field.name}" for field in dataclasses.fields(kind))
        else:
            # The keys are variables that the user names.
            yield section


def test_every_config_field_has_a_test() -> None:
    planned = [name for name in DRY_RUN if not name.startswith("launch.")]
    assert sorted([*ENGINE, *planned, *BY_ITSELF]) == sorted(every_field())


# This field is tested in tests/engine/saving/test_parts.py, on two nodes.
BY_ITSELF = ["checkpoint.copies"]


def shows(name: str) -> Callable[[Any], Any]:
    """A test that shows one field by itself."""
    BY_ITSELF.append(name)
    return lambda test: test


# -- the engine -----------------------------------------------------------------------------------

TINY: Sections = {
    "training": {"max_steps": 4, "batch_size": 2},
    "model": {"model_dim": 16, "num_layers": 1, "num_heads": 2},
    "dataset": {"kind": "synthetic", "sequence_length": 8},
    "checkpoint": {"at_end": False},
    "logging": {"interval": 1},
}
FEW = {"dataset": {"num_samples": 64}}
OWN = {
    "training": {"loss": "tests.engine.programs.configured:loss"},
    "model": {"target": "tests.engine.programs.configured:model"},
    "dataset": {"target": "tests.engine.programs.configured:uneven"},
}
TRACED = {"enabled": True, "wait": 0, "warmup": 0, "active": 1}


def merged(*changes: Sections) -> Sections:
    found: Sections = {}
    for change in changes:
        for section, values in copy.deepcopy(change).items():
            found.setdefault(section, {}).update(values)
    return found


def without(section: str, *names: str) -> Sections:
    """TINY, without what only some other kind of model or data has."""
    found = copy.deepcopy(TINY)
    for name in names:
        del found[section][name]
    return found


BASES: dict[str, tuple[list[int], Sections]] = {
    "alone": ([1], TINY),
    "sgd": ([1], merged(TINY, {"optimizer": {"name": "sgd"}})),
    "muon": ([1], merged(TINY, {"optimizer": {"name": "muon"}})),
    "wsd": ([1], merged(TINY, {"scheduler": {"name": "wsd"}})),
    "few samples": ([1], merged(TINY, FEW)),
    "evaluating": ([1], merged(TINY, FEW, {"training": {"eval_steps": 2}})),
    "without progress": ([1], merged(TINY, FEW, {
        "training": {"eval_steps": 1}, "checkpoint": {"best": "min eval_loss"},
        "optimizer": {"lr": 0.0}})),
    "ranking": ([1], merged(without("dataset", "sequence_length"), {"model": {"kind": "ranking"}})),
    "own": ([1], merged({**TINY, "model": {}, "dataset": {}}, OWN)),
    "NaN": ([1], merged({**TINY, "model": {}, "dataset": {}}, OWN, {
        "dataset": {"args": {"broken": [*range(8)]}, "shuffle": False}})),
    "unused": ([2], merged({**TINY, "model": {}, "dataset": {}}, OWN, {
        "model": {"args": {"heads": 2}}, "fsdp": {"sharding_strategy": "ddp"},
        "distributed": {"find_unused_parameters": True}})),
    "tokens": ([1], merged(without("dataset", "kind"), {"dataset": {"path": "PLACE/one.bin"}})),
    "tokens held out": ([1], merged(without("dataset", "kind"), {
        "dataset": {"path": "PLACE/one.bin", "eval_path": "PLACE/one.bin"},
        "training": {"eval_steps": 2}})),
    "two": ([2], merged(TINY, {"model": {"num_layers": 2}, "training": {
        "max_steps": 2, "mixed_precision": "bf16", "gradient_accumulation": 2}})),
    "two nodes": ([1, 1], TINY),
    "ddp": ([2], merged(TINY, {"fsdp": {"sharding_strategy": "ddp"}})),
    "compiled": ([1], merged(TINY, {"compile": {"enabled": True}})),
    "workers": ([1], merged(TINY, {"dataloader": {"num_workers": 1}})),
    "saving": ([1], merged(TINY, {"checkpoint": {"steps": 1}})),
    "resumable": ([1], merged(TINY, {"checkpoint": {"directory": "PLACE/kept"}})),
    "long": ([1], merged(TINY, {"training": {"max_steps": 10}})),
    "traced": ([1], merged(TINY, {"profiling": TRACED})),
}  # fmt: skip

# What several ranks say and do, those of one mesh show: they are the dearest.
AGAIN = [name for name, (nodes, _) in BASES.items() if sum(nodes) == 1 or name == "two nodes"]


@dataclass(frozen=True)
class Change:
    """With another value in this base, another part of what is seen. Parts: see `look`."""

    base: str
    value: Any
    seen: str = "losses"


ENGINE: dict[str, Change] = {
    "training.max_steps": Change("alone", 3, "logged"),
    "training.max_minutes": Change("alone", 1e-7, "told"),
    "training.batch_size": Change("alone", 3),
    "training.gradient_accumulation": Change("alone", 2),
    "training.mixed_precision": Change("alone", "bf16"),
    "training.activation_checkpointing": Change("alone", "full", "recomputed"),
    "training.grad_clip_norm": Change("sgd", 0.01),
    "training.ema": Change("evaluating", 0.5, "evaluated"),
    "training.seed": Change("alone", 1),
    "training.deterministic": Change("alone", True, "deterministic"),
    "training.max_bad_steps": Change("NaN", 2, "codes"),
    "training.eval_steps": Change("few samples", 2, "evaluated"),
    "training.eval_seconds": Change("few samples", 1e-9, "evaluated"),
    "training.eval_batches": Change("evaluating", 1, "evaluated"),
    "training.patience": Change("without progress", 1, "logged"),
    "training.loss": Change("alone", "tests.engine.core.test_fields:doubled"),
    "model.kind": Change("ranking", "decoder"),
    "model.target": Change("own", "tests.engine.core.test_fields:other_model"),
    "model.args": Change("own", {"dim": 4}),
    "model.vocab_size": Change("alone", 300),
    "model.model_dim": Change("alone", 32),
    "model.num_layers": Change("alone", 2),
    "model.num_heads": Change("alone", 4),
    "model.mlp_hidden_dim": Change("alone", 8),
    "model.dropout": Change("alone", 0.5),
    "model.num_kv_heads": Change("alone", 1),
    "model.rope_theta": Change("alone", 10.0),
    "model.norm_eps": Change("alone", 0.1),
    "model.tie_embeddings": Change("alone", True),
    "model.loss_chunk": Change("alone", 4, "logits"),
    "model.embedding_dim": Change("ranking", 8),
    "model.sparse_features": Change("ranking", 4),
    "model.num_dense_features": Change("ranking", 2),
    "model.dense_dim": Change("ranking", 8),
    "dataset.kind": Change("alone", "library"),
    "dataset.path": Change("tokens", "PLACE/other.bin"),
    "dataset.eval_path": Change("tokens held out", "PLACE/other.bin", "evaluated"),
    "dataset.target": Change("own", "tests.engine.core.test_fields:other_data"),
    "dataset.args": Change("own", {"size": 48}, "told"),
    "dataset.sequence_length": Change("alone", 16),
    "dataset.num_samples": Change("alone", 64),
    "dataset.eval_fraction": Change("evaluating", 0.5, "evaluated"),
    "dataset.shuffle": Change("alone", False),
    "optimizer.name": Change("alone", "sgd"),
    "optimizer.lr": Change("alone", 0.1),
    "optimizer.weight_decay": Change("alone", 0.5),
    "optimizer.betas": Change("alone", [0.5, 0.6]),
    "optimizer.eps": Change("alone", 0.1),
    "optimizer.momentum": Change("sgd", 0.0),
    "optimizer.muon_lr": Change("muon", 0.5),
    "optimizer.adjust_lr": Change("muon", "original"),
    "scheduler.name": Change("alone", "linear"),
    "scheduler.warmup_steps": Change("alone", 3),
    "scheduler.total_steps": Change("alone", 8),
    "scheduler.decay_steps": Change("wsd", 3),
    "scheduler.min_lr_ratio": Change("alone", 0.5),
    "fsdp.sharding_strategy": Change("two", "full_shard", "told"),
    "fsdp.shard_size": Change("two", 1, "told"),
    "fsdp.reshard_after_forward": Change("two", False, "gathered"),
    "fsdp.forward_prefetch": Change("two", 1, "set_modules_to_forward_prefetch"),
    "fsdp.backward_prefetch": Change("two", 2, "set_modules_to_backward_prefetch"),
    "fsdp.param_dtype": Change("two", "bf16"),
    "fsdp.reduce_dtype": Change("two", "bf16"),
    "fsdp.accumulate": Change("two", "whole", "scattered"),
    # It is refused with a message on a machine without a GPU.
    "fsdp.cpu_offload": Change("two", True, "told"),
    "fsdp.wrap": Change("two", ["Attention"], "gathered"),
    "distributed.backend": Change("alone", "nccl", "told"),  # refused
    "distributed.timeout": Change("two nodes", 77.0, "timeouts"),
    "distributed.bucket_cap_mb": Change("ddp", 1.0, "ddp"),
    "distributed.gradient_as_bucket_view": Change("ddp", False, "ddp"),
    "distributed.static_graph": Change("ddp", True, "ddp"),
    "distributed.find_unused_parameters": Change("unused", False, "codes"),
    "distributed.broadcast_buffers": Change("ddp", True, "ddp"),
    "compile.enabled": Change("alone", True, "compiled"),
    "compile.backend": Change("compiled", "eager", "compiled"),
    "compile.mode": Change("compiled", "max-autotune-no-cudagraphs", "compiled"),
    "compile.fullgraph": Change("compiled", True, "compiled"),
    "compile.dynamic": Change("compiled", True, "compiled"),
    "dataloader.num_workers": Change("alone", 1, "loader"),
    "dataloader.prefetch_factor": Change("workers", 4, "loader"),
    "checkpoint.steps": Change("alone", 2, "files"),
    "checkpoint.seconds": Change("alone", 1e-9, "files"),
    "checkpoint.at_end": Change("alone", True, "files"),
    "checkpoint.directory": Change("saving", "PLACE/elsewhere", "files"),
    "checkpoint.keep": Change("saving", 1, "files"),
    "checkpoint.best": Change("evaluating", "min eval_loss", "files"),
    "checkpoint.mirror": Change("saving", "file://PLACE/mirror", "files"),
    "checkpoint.asynchronous": Change("saving", False, "copied"),
    "checkpoint.memory_every": Change("alone", 3, "told"),
    "checkpoint.resume": Change("resumable", "auto", "told"),
    "profiling.enabled": Change("long", True, "files"),
    "profiling.wait": Change("traced", 1, "trace"),
    "profiling.warmup": Change("traced", 1, "trace"),
    "profiling.active": Change("traced", 2, "trace"),
    "profiling.record_shapes": Change("traced", True, "trace"),
    "profiling.profile_memory": Change("traced", True, "trace"),
    "profiling.with_stack": Change("traced", True, "trace"),
    "logging.interval": Change("alone", 2, "logged"),
}


def doubled(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    sums: LossSums = model(batch)
    return 2 * sums.loss, sums.count


def other_model() -> nn.Module:
    return own.model(dim=4)


def other_data(split: str) -> own.Uneven:
    return own.uneven(split, size=48)


Seen = dict[str, Any]
# These are the lines of progress, and those of torch's own log.
TIMELY = r"^step +\d+/|\.cpp:\d+\]"


def asked_of(name: str) -> tuple[list[int], Sections]:
    """Return the nodes and the config of "base NAME", "again NAME", or a field that is changed."""
    which, _, base = name.partition(" ")
    base = base or ENGINE[name].base
    if base == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch 2.9 has it")
    nodes, sections = BASES[base]
    if which in ("base", "again"):
        return nodes, sections
    section, key = name.split(".")
    return nodes, merged(sections, {section: {key: ENGINE[name].value}})


# Of the session, and each when it is asked for: workers of pytest take tests from each other.
@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seen]:
    """The observations of a base or of a change, which is run once."""
    directory = tmp_path_factory.mktemp("fields")
    for name, step in (("one", 1), ("other", 3)):
        token_file(directory / f"{name}.bin", step)
    keeps = merged(BASES["resumable"][1], {"checkpoint": {"steps": 2}})
    run(job(directory, "kept", [1], keeps))

    @functools.cache
    def observe(name: str) -> Seen:
        one = job(directory, name, *asked_of(name))
        (codes,) = run(one)
        return look(one, codes)

    return observe


def job(directory: Path, name: str, nodes: list[int], sections: Sections) -> Job:
    where = directory / name
    config = json.loads(json.dumps(sections).replace("PLACE", str(directory)))
    return Job(str(where), nodes, config, env={"SPY": str(where / "spied.json")})


def token_file(path: Path, step: int) -> None:
    text = array.array("H", (number * step % 250 for number in range(500)))
    with path.open("wb") as file:
        tokens.write_header(file, tokens.Header("uint16", 256, len(text)))
        file.write(text.tobytes())


def look(job: Job, codes: list[int]) -> Seen:
    """All that may differ, in parts; what the clock decides is left out."""
    outputs = job.experiment() / "outputs"
    spied = job.path / "spied.json"
    lines = job.metrics() if outputs.exists() else []
    steps = [line for line in lines if "loss" in line]
    saving = job.config["checkpoint"]
    others = [saving.get("directory"), saving.get("mirror", "").removeprefix("file://")]
    places = [outputs, *map(Path, filter(None, others))]
    return {
        "codes": codes,
        "losses": [(line["loss"], line["grad_norm"]) for line in steps],
        "logged": [(line["step"], line["tokens"], line["skipped_steps"]) for line in steps],
        "evaluated": [line | {"time": None} for line in lines if "loss" not in line],
        # A save is told when it is over, which may be before or after what comes next.
        "told": sorted(
            words(x, job) for x in job.output().splitlines() if not re.search(TIMELY, x)
        ),
        "files": [sorted(str(p.relative_to(root)) for p in root.rglob("*")) for root in places],
        "trace": traced(outputs / "profile" / "rank_00.json.gz"),
        **(json.loads(spied.read_text()) if spied.exists() else {}),
    }


def words(line: str, job: Job) -> str:
    """Return the line without measured values."""
    line = re.sub(r"[\d,]+\.\d+|[\d,]+(?=%| ms\b| s\b)", "#", line.replace(job.directory, "JOB"))
    return " ".join(line.split())


def traced(path: Path) -> Any:
    if not path.exists():
        return None
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    return {
        "steps": sorted(name for name in names if name.startswith("ProfilerStep")),
        "shapes": any("Input Dims" in event.get("args", {}) for event in events),
        "memory": "[memory]" in names,
        "stacks": any(event.get("cat") == "python_function" for event in events),
    }


@pytest.mark.parametrize("name", BASES)
def test_base_config_trains(name: str, observed: Callable[[str], Seen]) -> None:
    first = observed(f"base {name}")
    assert set(first["codes"]) == {0}, first["told"]
    assert first["losses"]


@pytest.mark.parametrize("name", AGAIN)
def test_base_config_is_deterministic(name: str, observed: Callable[[str], Seen]) -> None:
    assert observed(f"base {name}") == observed(f"again {name}")


@pytest.mark.parametrize("name", ENGINE)
def test_engine_honours_field(name: str, observed: Callable[[str], Seen]) -> None:
    change = ENGINE[name]
    before, after = observed(f"base {change.base}"), observed(name)
    different = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    assert change.seen in different, f"{name} changes {sorted(different)}; {after['told']}"
    if change.seen not in ("codes", "told"):
        assert set(after["codes"]) == {0}, after["told"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("training.max_minutes", "are over (step 2)"),
        ("dataset.args", "training on 48 samples"),
        ("fsdp.sharding_strategy", "full_shard: one copy of the parameters, in 2 shards"),
        ("fsdp.shard_size", "hybrid_shard: 2 copies of the parameters, each in 1 shard"),
        ("fsdp.cpu_offload", "there is no GPU to offload from"),
        ("distributed.backend", "distributed.backend is nccl, but this node has no GPU"),
        ("checkpoint.resume", "resuming after step 4"),
    ],
)
def test_engine_reports_field(name: str, words: str, observed: Callable[[str], Seen]) -> None:
    assert ENGINE[name].seen == "told"
    assert words in "\n".join(observed(name)["told"])


def test_every_group_has_configured_timeout(observed: Callable[[str], Seen]) -> None:
    """Also those of a mesh, to which torch would give 10 or 30 minutes of its own."""
    found = observed("distributed.timeout")["timeouts"]
    assert len(found) > 1
    assert set(found) == {77.0}


@shows("dataloader.pin_memory")
@pytest.mark.parametrize("workers", [0, 1])
def test_pin_memory_applies_only_with_gpu(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: asked.append(True) or tensor)
    monkeypatch.setattr(
        sources, "DataLoader", lambda *_, pin_memory, **__: iter([asked.append(pin_memory)])
    )
    for pinning in (True, False):
        asked.clear()
        loading = {"num_workers": workers, "pin_memory": pinning}
        config = parse.build_dataclass(Config, {"dataloader": loading})
        ranks = Ranks(0, 1, 0, torch.device("cpu"), ())
        next(sources.TrainingSamples(Numbers(), config, ranks).epoch(0))
        assert any(asked) == pinning


@shows("model.weights")
def test_run_begins_with_weights_of_other_run(tmp_path: Path) -> None:
    """As they were exported: the loss goes on where it was, also sharded over two ranks."""
    first = merged(TINY, FEW, {"training": {"eval_steps": 4}, "checkpoint": {"at_end": True}})
    job = Job(str(tmp_path / "first"), [1], first)
    assert run(job) == [[0]], job.output()
    kept = job.experiment() / "outputs/checkpoints/step_00000004"
    export.export_weights(kept, tmp_path / "out.safetensors")
    still = {"optimizer": {"lr": 0.0}, "training": {"eval_steps": 1, "max_steps": 1}}
    losses = [line["eval_loss"] for line in job.metrics() if "eval_loss" in line]
    for nodes in ([1], [2]):
        weights = {"model": {"weights": str(tmp_path / "out.safetensors")}}
        again = Job(str(tmp_path / str(sum(nodes))), nodes, merged(TINY, FEW, still, weights))
        assert run(again) == [[0] * sum(nodes)], again.output()
        (found,) = [line["eval_loss"] for line in again.metrics() if "eval_loss" in line]
        assert found == pytest.approx(losses[-1], abs=1e-6)


@shows("logging.trackers")
@shows("logging.tracker_options")
def test_engine_reports_to_trackers(tmp_path: Path) -> None:
    keys = {
        "training": {"eval_steps": 2},
        "dataset": {"num_samples": 64},
        "logging": {
            "trackers": ["tensorboard"],
            "tracker_options": {"tensorboard": {"log_dir": str(tmp_path / "tb")}},
        },
    }
    (codes,) = run(Job(str(tmp_path), [2], merged(TINY, keys)))
    assert codes == [0, 0]
    curves = EventAccumulator(str(tmp_path / "tb"))
    curves.Reload()
    assert {"loss", "epoch", "lr", "eval_loss", "eval_correct"} <= set(curves.Tags()["scalars"])
    assert [point.step for point in curves.Scalars("loss")] == [1, 2, 3, 4]
    assert [point.step for point in curves.Scalars("eval_loss")] == [2, 4]
    wrong = {"logging": {"tracker_options": {"mlfow": {}}, "trackers": ["mlflow"]}}
    with pytest.raises(UsageError, match="did you mean 'mlflow'"):
        parse.build_dataclass(Config, wrong)


class Numbers:
    def __len__(self) -> int:
        return 8

    def batch(self, indices: Any, position: int) -> Any:
        return torch.tensor(indices)


# -- the launch -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A key that --dry-run shows: another value for it, and where that is found in the plan."""

    set: str
    find: Callable[[Any], Any]
    expected: Any


def of_node(*keys: str) -> Callable[[Any], Any]:
    def find(plan: Any) -> Any:
        found = plan["nodes"][1]
        for key in keys:
            found = found.get(key)
        return found

    return find


PYTHON = str(BIN / f"python3.{sys.version_info.minor}")  # python or python3 is what is found
VENV = f"venv:{sys.prefix}"
DRY_RUN: dict[str, Ask] = {
    "launch.name": Ask("launch.name=other", lambda plan: plan["job"], "other_dry-run"),
    "launch.nnodes": Ask("launch.nnodes=1", lambda plan: plan["world_size"], 1),
    "launch.nproc": Ask("launch.nproc=3", lambda plan: plan["world_size"], 6),
    "launch.master_port": Ask("launch.master_port=29777", lambda plan: plan["master_port"], 29777),
    "launch.start": Ask("launch.start=plain", lambda plan: plan["start"], "plain"),
    "launch.python": Ask(f"launch.python={PYTHON}", of_node("python"), PYTHON),
    "launch.workdir": Ask("launch.workdir=/usr", of_node("workdir"), "/usr"),
    "launch.activate": Ask(f"launch.activate={VENV}", of_node("node", "activate"), VENV),
    "launch.wrap": Ask("launch.wrap=env A=1", of_node("node", "wrap"), "env A=1"),
    "launch.hook": Ask("launch.hook=hook.sh", of_node("env", "HOOKED"), "node 1"),
    "launch.gpus": Ask("launch.gpus=2", of_node("devices", "gpus"), 2),
    "launch.queue": Ask("launch.queue=true", of_node("devices", "needed"), True),
    "launch.claim": Ask("launch.claim=none", of_node("devices"), None),
    "nccl.profile": Ask("nccl.profile=ethernet", of_node("env", "NCCL_IB_DISABLE"), "1"),
    "nccl.variables": Ask("nccl.NCCL_DEBUG=INFO", of_node("env", "NCCL_DEBUG"), "INFO"),
    "env": Ask("env.OF_MINE=1", of_node("env", "OF_MINE"), "1"),
}
# The number of ranks is that of launch.nproc as well, the Python that of launch.python, and so on.
ALONE = ("launch.nnodes", "launch.activate", "launch.claim")


@pytest.fixture(scope="module")
def planned(two_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plans of the launch, as it is and with the keys changed."""
    head = Head(two_nodes, tmp_path_factory.mktemp("planned"))
    head.script("hook.sh", 'export HOOKED="node $NODE_RANK"\n')

    def ask(*words: str) -> Command:
        return head.launch("--dry-run", "--json", *words)

    together = [one.set for name, one in DRY_RUN.items() if name not in ALONE]
    asked = {"": ask(), "together": ask(*(word for key in together for word in ("--set", key)))}
    asked |= {name: ask("--set", DRY_RUN[name].set) for name in ALONE}
    found = {}
    for name, command in asked.items():
        assert command.finish() == 0, command.text
        found[name] = json.loads(command.text)
    return found


@pytest.mark.parametrize("name", DRY_RUN)
def test_launch_honours_field(name: str, planned: dict[str, Any]) -> None:
    one = DRY_RUN[name]
    assert one.find(planned[name if name in ALONE else "together"]) == one.expected
    assert one.find(planned[""]) != one.expected
