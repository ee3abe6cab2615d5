"""Understands the keys of aorta's config files, where they have one meaning here.

Only keys that this program does not have are examined. Renamed and ignored keys are reported. All
keys without a counterpart are refused at once, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.schema import SHARDED

Data = dict[str, Any]
MOVED = {
    "training.log_interval": "logging.interval",
    "dataset.seed": "training.seed",
    **{
        f"dataset.{key}": f"model.{key}"
        for key in ("vocab_size", "dense_dim", "sparse_features", "num_dense_features")
    },
}
PREFETCH = {"BACKWARD_PRE": 1, "BACKWARD_POST": 0, "NONE": 0, True: 1, False: 0}
# Left out where they have these values: the engine does so anyway, or it is aorta's way to say no.
NO_MATTER: dict[str, Callable[[Any], bool]] = {
    "logging.level": lambda _: True,
    # Each run has its own outputs.
    "training.output_dir": lambda _: True,
    "fsdp.use_orig_params": lambda value: value is True,
    "fsdp.limit_all_gathers": lambda value: value is True,
    "fsdp.sync_module_states": lambda value: value is True,
    "fsdp.param_init_device": lambda _: True,
    "distributed.overlap_grad_reduce": lambda value: not value,
    "distributed.overlap_param_gather": lambda value: not value,
    "distributed.use_reentrant_communication": lambda value: not value,
    "distributed.gradient_accumulation_steps": lambda value: value == 1,
    "compile.options": lambda value: not value,
    "profiling.repeat": lambda value: value in (0, 1),
    "profiling.profile_freq": lambda value: value in (0, 1),
    # The metrics contain mfu.
    "profiling.with_flops": lambda _: True,
    "profiling.tensorboard": lambda value: not value,
    "profiling.chrome_trace": lambda value: value is True,
    # The trace is in outputs/profile/rank_RR.json.gz.
    "profiling.trace_filename": lambda _: True,
}
STREAMS = "aorta's experiments with compute streams do not exist here: leave it out"
WHY = {
    **{
        f"training.{key}": STREAMS
        for key in (
            *("additional_compute_streams", "lightweight_ops_per_stream", "lightweight_op_size"),
            *("lightweight_op_duration_ms", "lightweight_op_waves", "use_useful_lightweight_ops"),
        )
    },
    "training.epochs": "the engine counts steps: write training.max_steps",
    "distributed.gradient_accumulation_steps": "write training.gradient_accumulation",
    "compile.options": "the engine passes no options to torch.compile: leave it out",
    "profiling.repeat": "one trace is written per run: leave it out",
    "profiling.profile_freq": "one trace is written per run: leave it out",
    "profiling.tensorboard": "the trace opens in ui.perfetto.dev: leave it out",
    "profiling.chrome_trace": "the trace is always Chrome's: leave it out, or profiling.enabled",
    "distributed.overlap_grad_reduce": "gradients are always sent during the backward pass",
    "distributed.overlap_param_gather": "set fsdp.forward_prefetch to the blocks gathered ahead",
    "distributed.use_reentrant_communication": "there is no such mode: leave it out",
    "fsdp.use_orig_params": "the engine's FSDP always keeps the parameters: leave it out",
    "fsdp.limit_all_gathers": "the engine's FSDP always limits them: leave it out",
    "fsdp.sync_module_states": "all ranks always begin with the same weights: leave it out",
    "streams": STREAMS,
    "tracelens": "`orchestrator profile` analyses traces: leave it out",
}


@dataclass
class Translation:
    """The config in our keys, with the renamed keys, the ignored keys, and the errors."""

    data: Data
    renamed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Return a line that lists the renamed keys, and one that lists the ignored keys."""
        said = []
        if self.renamed:
            said.append(f"aorta's keys, read as ours: {', '.join(self.renamed)}")
        if self.left_out:
            said.append(f"aorta's keys that change nothing here: {', '.join(self.left_out)}")
        return said


def translate_config(data: Data) -> Translation:
    """Return the config with aorta's keys replaced; the given one stays as it is."""
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    done = Translation(copied)
    move(done)
    choose_strategy(done)
    set_prefetch(done)
    choose_model(done)
    leave_out(done)
    refuse_the_rest(done)
    return done


def section(done: Translation, name: str) -> Data:
    """Return a section for reading; an empty one where it is missing or no section."""
    inner = done.data.get(name)
    return inner if isinstance(inner, dict) else {}


def move(done: Translation) -> None:
    for old, new in MOVED.items():
        (home, key), (there, name) = old.split("."), new.split(".")
        if key not in section(done, home):
            continue
        value = done.data[home].pop(key)
        if done.data.get(there) is None:
            done.data[there] = {}
        known = section(done, there)
        if known.get(name, value) != value:
            done.problems.append(f"{old} is {value!r}, but {new} is {known[name]!r}: leave one out")
        elif isinstance(done.data[there], dict):
            done.data[there][name] = value
            done.renamed.append(f"{old} is {new}")


def choose_strategy(done: Translation) -> None:
    """Obey distributed.mode: aorta reads fsdp: or distributed:'s keys of DDP, never both."""
    mode = section(done, "distributed").get("mode")
    if mode not in ("ddp", "fsdp"):
        return
    del done.data["distributed"]["mode"]
    fsdp = section(done, "fsdp")
    if mode == "ddp":
        done.data["fsdp"] = {"sharding_strategy": "ddp"}
        done.renamed.append("distributed.mode ddp is fsdp.sharding_strategy ddp")
        if fsdp:
            done.left_out.append("the rest of fsdp (distributed.mode is ddp)")
    elif fsdp.get("sharding_strategy", "full_shard") in SHARDED:
        ours = ("backend", "timeout")
        dropped = [key for key in section(done, "distributed") if key not in ours]
        for key in dropped:
            del done.data["distributed"][key]
        done.left_out += [f"distributed.{key} (distributed.mode is fsdp)" for key in dropped]


def set_prefetch(done: Translation) -> None:
    fsdp = section(done, "fsdp")
    for key in ("backward_prefetch", "forward_prefetch"):
        value = fsdp.get(key)
        if isinstance(value, (bool, str)) and value in PREFETCH:
            fsdp[key] = PREFETCH[value]
            done.renamed.append(f"fsdp.{key} {value!s} is {PREFETCH[value]}")


def choose_model(done: Translation) -> None:
    """aorta has one model, which is our ranking one; its data are synthetic."""
    model = section(done, "model")
    ranking = {"embedding_dim", "sparse_features", "num_dense_features", "dense_dim"}
    if ranking & model.keys() and not {"kind", "target"} & model.keys():
        model["kind"] = "ranking"
        done.renamed.append("model is model.kind ranking")
        if done.data.get("dataset") is None:
            done.data["dataset"] = {}
        dataset = section(done, "dataset")
        if not {"kind", "path", "target"} & dataset.keys():
            dataset["kind"] = "synthetic"
            done.renamed.append("dataset is dataset.kind synthetic")


def leave_out(done: Translation) -> None:
    for name, harmless in NO_MATTER.items():
        home, key = name.split(".")
        inner = section(done, home)
        if key in inner and harmless(inner[key]):
            del inner[key]
            done.left_out.append(name)
    if "epochs" in section(done, "training") and "max_steps" in section(done, "training"):
        del done.data["training"]["epochs"]
        done.left_out.append("training.epochs (training.max_steps decides)")
    if "tracelens" in done.data and not section(done, "tracelens").get("enabled"):
        del done.data["tracelens"]
        done.left_out.append("tracelens")


def refuse_the_rest(done: Translation) -> None:
    for name, reason in WHY.items():
        home, _, key = name.partition(".")
        holder = section(done, home) if key else done.data
        if (key or home) in holder:
            del holder[key or home]
            done.problems.append(f"{name}: {reason}")
