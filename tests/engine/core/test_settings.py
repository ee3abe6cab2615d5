"""Every key of the config: a Trainer reads it, or refuses it by name with what to use instead."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.engine.core.settings import TrainerSettings, trainer_config
from tests.engine.core.test_fields import ENGINE, every_field
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

# Section -> the keys that a Trainer reads, and what has to be set beside them.
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "training": (
        "max_steps max_minutes activation_checkpointing deterministic max_bad_steps eval_steps"
        " eval_seconds eval_batches patience",
        {"eval_steps": 7},
    ),
    "fsdp": (
        "shard_size reshard_after_forward forward_prefetch backward_prefetch param_dtype"
        " reduce_dtype accumulate cpu_offload wrap",
        {},
    ),
    "distributed": (
        "timeout bucket_cap_mb gradient_as_bucket_view static_graph find_unused_parameters"
        " broadcast_buffers",
        {},
    ),
    "compile": ("enabled backend mode fullgraph dynamic", {"enabled": True}),
    "checkpoint": (
        "steps seconds at_end directory keep copies best mirror asynchronous memory_every resume",
        {},
    ),
    "profiling": (
        "enabled wait warmup active record_shapes profile_memory with_stack",
        {"enabled": True},
    ),
    "logging": ("interval", {}),
}
KEYS = {f"{section}.{key}" for section, (keys, _) in READ.items() for key in keys.split()}


@pytest.mark.parametrize("name", [*every_field()])
def test_every_key_is_read_or_refused(name: str) -> None:
    section, _, key = name.partition(".")
    own = {"precision": "bf16"} if name == "fsdp.param_dtype" else {}
    strategy = "ddp" if section == "distributed" and key != "backend" else "hybrid_shard"
    if name in KEYS:
        value = ENGINE[name].value if name in ENGINE else 2
        beside = {**READ[section][1], key: value}
        made = trainer_config(TrainerSettings(config={section: beside}, strategy=strategy, **own))
        read = getattr(getattr(made, section), key)
        assert read == (tuple(value) if isinstance(value, list) else value)
        return
    with pytest.raises(UsageError, match=f"a Trainer does not read {name}\n") as error:
        trainer_config(
            TrainerSettings(config={section: {key: 1} if key else {}}, strategy=strategy)
        )
    assert error.value.fix


def test_unknown_key_is_named() -> None:
    with pytest.raises(UsageError, match="did you mean 'shard_size'"):
        trainer_config(TrainerSettings(config={"fsdp": {"shard_sise": 2}}))
    with pytest.raises(UsageError, match="was removed"):
        trainer_config(TrainerSettings(strategy="auto"))
    with pytest.raises(UsageError, match=r"config\['fsdp'\] must hold keys, not 2"):
        trainer_config(TrainerSettings(config={"fsdp": 2}))


# -- and they do what they do in the engine -------------------------------------------------------


def test_trainer_honours_engine_keys(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "a"), [2], {}, call="tests.engine.programs.trainings:keys_at_work")
    assert run(job) == [[0, 0]], job.output()
    ended, step, deterministic, short, lines = json.loads((job.path / "told").read_text())
    assert (ended, step) == ("training.max_steps (8) is reached", 8)
    assert deterministic is True
    assert short == "training.max_minutes (1e-09) are over"
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [1, 4, 8]
    assert all(line["mfu_measured"] > 0 and line["forward_backward_ms"] > 0 for line in lines[:1])
    assert [line["step"] for line in lines if "eval_loss" in line] == [3]
    kept = sorted(path.name for path in (job.path / "kept").iterdir())
    assert kept == ["step_00000006", "step_00000008"]
    outputs = job.experiment() / "outputs"
    assert (outputs / "profile/rank_01.json.gz").exists()
