"""aorta's own config for two nodes: what has one meaning is understood, the rest named at once."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.common.errors import UsageError
from orchestrator.config.aorta import translate_config
from orchestrator.config.load import load_and_note, load_config

# The keys and values of aorta's config/multi_node/distributed_two_nodes.yaml.
TWO_NODES: dict[str, Any] = {
    "logging": {"level": "INFO"},
    "training": {
        **{"epochs": 1, "batch_size": 512, "gradient_accumulation": 4, "mixed_precision": "bf16"},
        **{"grad_clip_norm": 1.0, "log_interval": 5, "max_steps": 10},
        **{"output_dir": "overlap_debug_multinode", "additional_compute_streams": 4},
        **{"lightweight_ops_per_stream": 5000, "lightweight_op_size": 512},
        **{"lightweight_op_duration_ms": 50, "use_useful_lightweight_ops": False},
        **{"lightweight_op_waves": 3},
    },
    "optimizer": {"lr": 0.0002, "weight_decay": 0.01, "betas": [0.9, 0.985]},
    "scheduler": {"warmup_steps": 200, "total_steps": 2200},
    "dataset": {
        **{"num_samples": 200000, "sequence_length": 176, "dense_dim": 256, "sparse_features": 48},
        **{"vocab_size": 350000, "num_dense_features": 32, "seed": 2025},
    },
    "model": {
        **{"vocab_size": 350000, "embedding_dim": 256, "num_dense_features": 32, "dense_dim": 256},
        **{"model_dim": 1024, "num_heads": 16, "num_layers": 20, "dropout": 0.1},
        **{"mlp_hidden_dim": 4608},
    },
    "fsdp": {
        **{"sharding_strategy": "hybrid_shard", "backward_prefetch": "BACKWARD_PRE"},
        **{"use_orig_params": True, "limit_all_gathers": True, "forward_prefetch": True},
        **{"sync_module_states": True, "param_init_device": "meta"},
    },
    "distributed": {
        **{"backend": "nccl", "mode": "ddp", "bucket_cap_mb": 32, "gradient_as_bucket_view": True},
        **{"static_graph": True, "find_unused_parameters": False, "broadcast_buffers": False},
        **{"overlap_grad_reduce": False, "overlap_param_gather": False},
        **{"gradient_accumulation_steps": 1, "use_reentrant_communication": False, "timeout": 180},
    },
    "compile": {
        **{"enabled": False, "backend": "inductor", "mode": "reduce-overhead", "fullgraph": False},
        **{"dynamic": False, "options": {}},
    },
    "streams": {"num_streams": 6, "high_priority": ["allreduce"]},
    "dataloader": {"num_workers": 8, "pin_memory": True},
    "profiling": {
        **{"enabled": True, "wait": 1, "warmup": 1, "active": 5, "repeat": 1},
        **{"record_shapes": True, "profile_memory": True, "profile_freq": 1, "with_stack": True},
        **{"with_flops": True, "tensorboard": False, "chrome_trace": True},
        **{"trace_filename": "customer_trace.json"},
    },
    "tracelens": {"enabled": False},
}
NO_COUNTERPART = [
    *("training.additional_compute_streams", "training.lightweight_ops_per_stream"),
    *("training.lightweight_op_size", "training.lightweight_op_duration_ms"),
    *("training.lightweight_op_waves", "training.use_useful_lightweight_ops", "streams"),
]


def write(tmp_path: Path, data: dict[str, Any]) -> Path:
    file = tmp_path / "aorta.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    left = {key: dict(value) for key, value in data.items()}
    for name in names:
        section, _, key = name.partition(".")
        del (left[section] if key else left)[key or section]
    return left


def test_keys_without_counterpart_are_listed(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        load_config(write(tmp_path, TWO_NODES))
    heading, *lines = error.value.what.splitlines()
    assert heading == f"{len(NO_COUNTERPART)} mistakes in the config:"
    assert [line.split(":")[0].strip() for line in lines] == NO_COUNTERPART
    # What only a whole config can show comes next, and is the last.
    with pytest.raises(UsageError, match=r"^dataset.sequence_length is set, but model.kind is"):
        load_config(write(tmp_path, without(TWO_NODES, *NO_COUNTERPART)))


def test_other_keys_are_translated_and_noted(tmp_path: Path) -> None:
    data = without(TWO_NODES, *NO_COUNTERPART, "dataset.sequence_length")
    config, notes = load_and_note(write(tmp_path, data))
    assert (config.fsdp.sharding_strategy, config.distributed.bucket_cap_mb) == ("ddp", 32)
    assert (config.logging.interval, config.training.seed) == (5, 2025)
    assert (config.model.kind, config.model.sparse_features) == ("ranking", 48)
    assert (config.dataset.kind, config.dataset.num_samples) == ("synthetic", 200000)
    assert (config.profiling.active, config.compile.enabled) == (5, False)
    read, left_out = notes
    assert "training.log_interval is logging.interval" in read
    assert "distributed.mode ddp is fsdp.sharding_strategy ddp" in read
    assert "the rest of fsdp (distributed.mode is ddp)" in left_out
    assert "profiling.trace_filename" in left_out and "tracelens" in left_out


def test_fsdp_mode_is_translated(tmp_path: Path) -> None:
    data = without(TWO_NODES, *NO_COUNTERPART, "dataset.sequence_length")
    data["distributed"]["mode"] = "fsdp"
    config = load_config(write(tmp_path, data))
    assert config.fsdp.sharding_strategy == "hybrid_shard"
    assert (config.fsdp.backward_prefetch, config.fsdp.forward_prefetch) == (1, 1)
    assert (config.distributed.timeout, config.distributed.bucket_cap_mb) == (180, 25)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"training": {"epochs": 3}}, "training.epochs: the engine counts steps"),
        ({"tracelens": {"enabled": True}}, "tracelens: `orchestrator profile`"),
        ({"profiling": {"repeat": 3}}, "profiling.repeat: one trace is written per run"),
        ({"dataset": {"seed": 1}, "training": {"seed": 2}}, "dataset.seed is 1, but training.seed"),
    ],
)
def test_conflicting_keys_are_refused(data: dict[str, Any], words: str) -> None:
    (problem,) = translate_config(data).problems
    assert problem.startswith(words)


def test_own_config_is_unchanged() -> None:
    own = {"fsdp": {"backward_prefetch": 2}, "dataset": {"kind": "library"}, "env": None, "x": 1}
    done = translate_config(own)
    assert (done.data, done.notes, done.problems) == (own, [], [])


def test_disabled_section_keeps_its_keys(tmp_path: Path) -> None:
    file = write(tmp_path, {"profiling": {"enabled": True, "wait": 1, "active": 2, "warmup": 0}})
    assert load_config(file).profiling.active == 2
    assert not load_config(file, ["profiling.enabled=false"]).profiling.enabled
    with pytest.raises(UsageError, match=r"unknown key 'compile.modes'"):
        load_config(write(tmp_path, {"compile": {"enabled": False, "modes": "default"}}))
    with pytest.raises(UsageError, match=r"nothing reads it while compile.enabled is false"):
        load_config(None, ["compile.mode=default"])
