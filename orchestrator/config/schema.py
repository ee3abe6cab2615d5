"""Every key of the config, as frozen dataclasses; load.py reads them from YAML.

The classes are the reference: a key exists because a field does, and a field exists because
something honours it. The head reads `launch` (config/launch.py), every rank the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.common.errors import UsageError, did_you_mean
from orchestrator.common.program import MOST_ABOVE
from orchestrator.config.launch import Launch
from orchestrator.config.parse import REST, Section, check_multiple, raise_problems

SHARDED = ("hybrid_shard", "full_shard", "shard_grad_op")
# Two names of one strategy: a whole copy on every rank.
COPIED = ("ddp", "no_shard")


def only(name: str, *values: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the condition that another key has one of these values."""
    return name, values


def setting(
    default: Any, meaning: str, *conditions: tuple[str, tuple[Any, ...]], **bounds: Any
) -> Any:
    """Declare a key: its default, its line in docs/config.md, when it has a meaning, its bounds.

    The bounds are `choices`, or those of parse.check_bounds().
    """
    made: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return field(**made, metadata={"meaning": meaning, "only": conditions, "bounds": bounds})


@dataclass(frozen=True)
class TrainingConfig(Section):
    """The length of the training, and its arithmetic."""

    max_steps: int = setting(100, "optimizer steps of the run", least=1)
    max_minutes: float | None = setting(
        None, "save and end after this time, unless max_steps comes first", above=0
    )
    batch_size: int = setting(8, "samples per rank and micro-batch", least=1)
    gradient_accumulation: int = setting(1, "micro-batches per step", least=1)
    mixed_precision: str = setting(
        "fp32", "compute in fp32, bf16 or fp16; weights stay fp32", choices=("fp32", "bf16", "fp16")
    )
    activation_checkpointing: str = setting(
        "none",
        "none; selective (keep costly activations); full",
        choices=("none", "selective", "full"),
    )
    grad_clip_norm: float = setting(
        1.0, "largest norm of the whole gradient; 0 turns clipping off", least=0
    )
    ema: float | None = setting(
        None,
        "evaluate an average of the weights with this decay per step, such as 0.999",
        above=0,
        below=1,
    )
    seed: int = setting(0, "seed of weights, sample order and dropout")
    deterministic: bool = setting(False, "use only operations that give the same bits every time")
    max_bad_steps: int = setting(10, "end after this many steps in a row with NaN or inf", least=1)
    eval_steps: int | None = setting(None, "steps between evaluations on held-out samples", least=1)
    eval_seconds: float | None = setting(None, "seconds between evaluations", above=0)
    eval_batches: int | None = setting(
        None, "most batches per rank in an evaluation; default: all samples", least=1
    )
    patience: int | None = setting(
        None, "end after this many evaluations without a better checkpoint.best", least=1
    )
    loss: str | None = setting(
        None, "package.module:function of (model, batch); default: the model's own"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_batches and not (self.eval_steps or self.eval_seconds):
            raise UsageError(
                "training.eval_batches is set, but neither training.eval_steps nor"
                " training.eval_seconds says when to evaluate"
            )


def imply(section: str, values: Any, key: str, kind: str) -> None:
    """Set the kind that this key means, if it is set; UsageError if another was chosen."""
    if getattr(values, key) is not None and values.kind != kind:
        if values.kind != type(values).kind:
            raise UsageError(f"{section}.kind is {values.kind!r}, but {section}.{key} is set too")
        object.__setattr__(values, "kind", kind)


DECODER = only("model.kind", "decoder")
RANKING = only("model.kind", "ranking")
OWN_MODEL = only("model.kind", "target")
BUILT_IN = only("model.kind", "decoder", "ranking")


@dataclass(frozen=True)
class ModelConfig(Section):
    """The model to train: a decoder language model, a ranking transformer, or your own."""

    kind: str = setting(
        "decoder",
        "decoder, ranking, or target (implied by model.target)",
        choices=("decoder", "ranking", "target"),
    )
    target: str | None = setting(None, "package.module:function that returns the model", OWN_MODEL)
    args: dict[str, Any] = setting({}, "arguments of target", OWN_MODEL)
    weights: str | None = setting(
        None, "values to begin with: a .safetensors file, or a directory of them"
    )
    vocab_size: int = setting(256, "tokens, or ids per sparse feature", BUILT_IN, least=1)
    model_dim: int = setting(64, "channels of a token", BUILT_IN, least=1)
    num_layers: int = setting(2, "blocks", BUILT_IN, least=1)
    num_heads: int = setting(4, "attention heads of a block", BUILT_IN, least=1)
    mlp_hidden_dim: int | None = setting(
        None,
        "channels inside a block's MLP; default: 8/3 x model_dim, or 4 x for ranking",
        BUILT_IN,
        least=1,
    )
    dropout: float = setting(
        0.0, "part of the activations that is dropped", BUILT_IN, least=0, below=1
    )
    num_kv_heads: int | None = setting(
        None, "heads of keys and values; fewer than num_heads: grouped queries", DECODER, least=1
    )
    rope_theta: float = setting(10000.0, "base of the rotary positions", DECODER, above=0)
    norm_eps: float = setting(1e-5, "epsilon of the norms", DECODER, above=0)
    tie_embeddings: bool = setting(
        False, "the output head uses the weights of the embedding", DECODER
    )
    loss_chunk: int = setting(4096, "tokens whose logits exist at once", DECODER, least=1)
    embedding_dim: int = setting(32, "channels per sparse feature", RANKING, least=1)
    sparse_features: int = setting(8, "number of sparse features", RANKING, least=1)
    num_dense_features: int = setting(4, "number of dense features", RANKING, least=1)
    dense_dim: int = setting(16, "numbers per dense feature", RANKING, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        imply("model", self, "target", "target")
        if self.kind == "target" and self.target is None:
            raise UsageError("model.kind is 'target', but model.target names no function")
        check_multiple("model.model_dim", self.model_dim, "model.num_heads", self.num_heads)
        if self.kind == "decoder" and self.model_dim // self.num_heads % 2:
            raise UsageError(
                f"model.model_dim ({self.model_dim}) / model.num_heads ({self.num_heads})"
                " must be even: positions turn pairs of channels"
            )
        if self.num_kv_heads is not None:
            check_multiple(
                "model.num_heads", self.num_heads, "model.num_kv_heads", self.num_kv_heads
            )


FILES = only("dataset.kind", "tokens")
SPLIT = only("dataset.kind", "library", "tokens", "synthetic")
SYNTHETIC = only("dataset.kind", "synthetic")
OWN_DATA = only("dataset.kind", "target")


@dataclass(frozen=True)
class DatasetConfig(Section):
    """The data to train on. Every sample is seen once per epoch, for any number of ranks.

    library: Python's own sources, as bytes. synthetic. tokens: a file of scripts/make_tokens.py.
    target: your own.
    """

    kind: str = setting(
        "library",
        "one of the above; path and target imply it",
        choices=("library", "synthetic", "tokens", "target"),
    )
    path: str | None = setting(None, "file of scripts/make_tokens.py", FILES)
    eval_path: str | None = setting(
        None, "file of held-out tokens; default: the end of path", FILES
    )
    target: str | None = setting(None, "package.module:function that returns the dataset", OWN_DATA)
    args: dict[str, Any] = setting({}, "arguments of target", OWN_DATA)
    sequence_length: int = setting(64, "tokens per sample", SPLIT, least=1)
    num_samples: int = setting(10000, "samples to invent", SYNTHETIC, least=2)
    eval_fraction: float = setting(
        0.05, "part of the samples that is held out, without eval_path", SPLIT, least=0, below=1
    )
    shuffle: bool = setting(True, "draw the samples of an epoch in a random order")

    def __post_init__(self) -> None:
        if self.kind in ("records", "huggingface"):
            raise UsageError(
                f"dataset.kind={self.kind} was removed",
                "dataset.target names a function that returns datasets.load_dataset(...)",
            )
        super().__post_init__()
        imply("dataset", self, "target", "target")
        imply("dataset", self, "path", "tokens")
        if self.kind == "target" and self.target is None:
            raise UsageError("dataset.kind is 'target', but dataset.target names no function")
        if self.kind == "tokens" and self.path is None:
            raise UsageError("dataset.kind is 'tokens', but dataset.path names no file")


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """The optimizer. Weight decay applies to matrices, not to vectors (norms, biases).

    With `muon`, torch's Muon trains the matrices inside the repeated blocks, and AdamW the rest:
    embeddings, the output head, and all weights that do not have two dimensions.
    """

    name: str = setting("adamw", "adamw, sgd or muon", choices=("adamw", "sgd", "muon"))
    lr: float = setting(3e-3, "highest learning rate; with muon, of what AdamW trains", least=0)
    weight_decay: float = setting(0.01, "decay of matrices", least=0)
    betas: tuple[float, float] = setting(
        (0.9, 0.95),
        "decay of AdamW's averages",
        only("optimizer.name", "adamw", "muon"),
        least=0,
        below=1,
    )
    eps: float = setting(1e-8, "epsilon of AdamW", only("optimizer.name", "adamw", "muon"), least=0)
    momentum: float | None = setting(
        None,
        "default: 0.9 with sgd, 0.95 with muon",
        only("optimizer.name", "sgd", "muon"),
        least=0,
        below=1,
    )
    muon_lr: float | None = setting(
        None,
        "learning rate of the matrices in the blocks; default: optimizer.lr",
        only("optimizer.name", "muon"),
        least=0,
    )
    adjust_lr: str = setting(
        "match_rms_adamw",
        "scale muon_lr by a matrix's shape, so that updates are as large as AdamW's; or original",
        only("optimizer.name", "muon"),
        choices=("match_rms_adamw", "original"),
    )


@dataclass(frozen=True)
class SchedulerConfig(Section):
    """The learning rate: it rises from zero during the warm-up, then follows `name`."""

    name: str = setting(
        "cosine",
        "constant, linear, cosine, or wsd (warm up, hold, decay)",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    warmup_steps: int | None = setting(
        None, "steps of the warm-up; default: a twentieth of all steps", least=0
    )
    total_steps: int | None = setting(
        None, "steps until the end of the schedule; default: training.max_steps", least=1
    )
    decay_steps: int | None = setting(
        None,
        "steps of the decay; default: a fifth of all steps",
        only("scheduler.name", "wsd"),
        least=1,
    )
    min_lr_ratio: float = setting(
        0.1,
        "final rate as a part of optimizer.lr",
        only("scheduler.name", "linear", "cosine", "wsd"),
        least=0,
        most=1,
    )


FSDP = only("fsdp.sharding_strategy", *SHARDED)
DDP = only("fsdp.sharding_strategy", *COPIED)


@dataclass(frozen=True)
class FsdpConfig(Section):
    """The sharding of parameters over the ranks.

    hybrid_shard: sharded over the ranks of a node, where links are fast, a copy on every node.
    full_shard: over all ranks. shard_grad_op: so too, but whole from forward to backward.
    ddp or no_shard: a copy on every rank.
    """

    sharding_strategy: str = setting("hybrid_shard", "one of the above", choices=SHARDED + COPIED)
    shard_size: int | None = setting(
        None,
        "ranks that share one copy; default: the ranks of a node",
        only("fsdp.sharding_strategy", "hybrid_shard"),
        least=1,
    )
    reshard_after_forward: bool = setting(
        True,
        "free a block's whole parameters between forward and backward: memory for communication",
        only("fsdp.sharding_strategy", "hybrid_shard", "full_shard"),
    )
    forward_prefetch: int = setting(
        0, "blocks gathered in advance of the forward pass", FSDP, least=0
    )
    backward_prefetch: int = setting(
        1, "blocks gathered in advance of the backward pass", FSDP, least=0
    )
    param_dtype: str = setting(
        "fp32",
        "dtype of gathered weights: fp32 or bf16",
        FSDP,
        only("training.mixed_precision", "bf16"),
        choices=("fp32", "bf16"),
    )
    reduce_dtype: str = setting(
        "fp32", "dtype of gradient sums: fp32 or bf16", FSDP, choices=("fp32", "bf16")
    )
    accumulate: str = setting(
        "sharded",
        "gradients between micro-batches: sharded, or whole (faster, more memory)",
        FSDP,
        choices=("sharded", "whole"),
    )
    cpu_offload: bool = setting(False, "keep shards in host memory", FSDP)
    wrap: tuple[str, ...] = setting(
        (), "classes of your model to shard; default: the blocks of ModuleLists"
    )


@dataclass(frozen=True)
class DistributedConfig(Section):
    """The process group, and what ddp does with it."""

    backend: str | None = setting(
        None, "nccl or gloo; default: nccl with GPUs, else gloo", choices=("nccl", "gloo")
    )
    timeout: float = setting(
        600.0, "seconds after which a collective fails that other ranks do not join", above=0
    )
    bucket_cap_mb: float = setting(25.0, "megabytes of gradients sent together", DDP, above=0)
    gradient_as_bucket_view: bool = setting(
        True, "let gradients be views of the buckets, which saves a copy", DDP
    )
    static_graph: bool = setting(False, "tell ddp that every step uses the same parameters", DDP)
    find_unused_parameters: bool = setting(
        False, "let steps leave out parts of the model; for ddp alone"
    )
    broadcast_buffers: bool = setting(
        False, "send rank 0's buffers to all ranks before each forward pass", DDP
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.static_graph and self.find_unused_parameters:
            raise UsageError(
                "distributed.static_graph and distributed.find_unused_parameters exclude each other"
            )


@dataclass(frozen=True)
class NcclConfig(Section):
    """The network between nodes; `orchestrator plan --explain` shows the result and why."""

    profile: str = setting(
        "auto",
        "auto (the fastest that all nodes have), infiniband, roce, ethernet or debug",
        choices=("auto", "infiniband", "roce", "ethernet", "debug"),
    )
    variables: dict[str, str] = field(
        default_factory=dict, metadata={**REST, "meaning": "such as NCCL_DEBUG"}
    )


COMPILED = only("compile.enabled", True)


@dataclass(frozen=True)
class CompileConfig(Section):
    """torch.compile, block by block."""

    enabled: bool = setting(False, "compile the model")
    backend: str = setting("inductor", "backend of torch.compile", COMPILED)
    mode: str | None = setting(
        None, "mode of torch.compile, such as max-autotune-no-cudagraphs", COMPILED
    )
    fullgraph: bool = setting(False, "make a graph break an error", COMPILED)
    dynamic: bool | None = setting(None, "expect shapes that change", COMPILED)


@dataclass(frozen=True)
class DataloaderConfig(Section):
    """The loading of samples from disk to device."""

    num_workers: int = setting(
        0, "loading processes per rank; 0: the rank loads by itself", least=0
    )
    pin_memory: bool = setting(
        True, "pin host memory, so that copies to GPUs overlap with computation"
    )
    prefetch_factor: int = setting(2, "batches that each worker loads in advance", least=1)


def best_metric(key: str, text: str) -> tuple[str, bool]:
    """Read "min val_loss": the name of a metric, and whether its lowest value is the best."""
    how, _, name = text.strip().partition(" ")
    if how not in ("min", "max") or not name.strip():
        raise UsageError(
            f"{key} is {text!r}; it must be min or max, and the name of a metric",
            'such as "min val_loss" or "max val_accuracy"',
        )
    return name.strip(), how == "min"


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """Saved state: sharded, checksummed, written whole or not at all."""

    steps: int | None = setting(None, "steps between two checkpoints", least=1)
    seconds: float | None = setting(None, "seconds between two checkpoints", above=0)
    at_end: bool = setting(True, "also save when the run ends or is stopped")
    directory: str | None = setting(
        None, "where to save; default: outputs/checkpoints of the experiment"
    )
    keep: int = setting(3, "number of the newest to keep", least=1)
    copies: int = setting(
        1, "nodes that keep each part where they share no disk; 2: also a neighbour", least=1
    )
    best: str | None = setting(None, 'also keep the best: "min eval_loss", "max eval_correct"')
    asynchronous: bool = setting(True, "continue training while files are written")
    mirror: str | None = setting(
        None, "copy each in the background to s3://BUCKET/NAME or file:///PATH"
    )
    memory_every: int | None = setting(
        None, "steps between states in memory; 0: none; default: at most 3% of the time", least=0
    )
    resume: str = setting(
        "never", "never; auto (the newest valid one); a checkpoint, experiment or mirror"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mirror is not None and "://" not in self.mirror:
            raise UsageError(
                f"checkpoint.mirror is {self.mirror!r}, which is not a URL",
                "such as s3://bucket/name, or file:///mnt/name for a directory",
            )
        if self.best is not None:
            best_metric("checkpoint.best", self.best)


PROFILED = only("profiling.enabled", True)


@dataclass(frozen=True)
class ProfilingConfig(Section):
    """A Chrome trace per rank, over some steps of the run; `orchestrator profile` reads them."""

    enabled: bool = setting(False, "trace some steps")
    wait: int | None = setting(
        None, "steps before the trace; default: 5, or fewer in a short run", PROFILED, least=0
    )
    warmup: int | None = setting(
        None, "steps traced and discarded; default: 2, or fewer in a short run", PROFILED, least=0
    )
    active: int = setting(3, "steps in the trace", PROFILED, least=1)
    record_shapes: bool = setting(False, "record the shapes of tensors", PROFILED)
    profile_memory: bool = setting(False, "record allocations", PROFILED)
    with_stack: bool = setting(False, "record the lines of Python", PROFILED)

    def within(self, steps: int) -> ProfilingConfig:
        """Decide the steps before the trace: where the run is short, it begins at the beginning."""
        wait, warmup = self.wait, self.warmup
        if warmup is None:
            warmup = min(2, max(0, steps - self.active - (wait or 0)))
        if wait is None:
            wait = min(5, max(0, steps - self.active - warmup))
        return dataclasses.replace(self, wait=wait, warmup=warmup)

    @property
    def steps_before(self) -> int:
        return (self.wait or 0) + (self.warmup or 0)


TRACKERS = ("tensorboard", "wandb", "mlflow")


@dataclass(frozen=True)
class LoggingConfig(Section):
    """The reports of a run."""

    interval: int = setting(10, "steps between two progress lines and metrics lines", least=1)
    trackers: tuple[str, ...] = setting(
        (), "tensorboard, wandb, mlflow: they receive what rank 0 measures", choices=TRACKERS
    )
    tracker_options: dict[str, Any] = setting({}, "options by tracker: {wandb: {project: p}}")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, options in self.tracker_options.items():
            if name not in self.trackers:
                raise UsageError(
                    f"logging.tracker_options has options of {name!r}, which is not among"
                    f" logging.trackers{did_you_mean(name, self.trackers)}"
                )
            if not isinstance(options, Mapping):
                raise UsageError(
                    f"logging.tracker_options.{name} must hold option: value pairs, not {options!r}"
                )


@dataclass(frozen=True)
class SyncConfig(Section):
    """The files that travel to nodes which do not share the head's directory."""

    include: tuple[str, ...] = setting(
        (), "patterns of files that are sent although git ignores them"
    )
    exclude: tuple[str, ...] = setting((), "patterns of files that are not sent")
    outputs: tuple[str, ...] = setting(
        (), "directories that the program writes; each node keeps its own"
    )
    link: tuple[str, ...] = setting(
        (), "more directories of inputs that each node has, beside data, datasets and .venv"
    )
    largest_file: float = setting(200.0, "megabytes of the largest file that is sent", above=0)
    largest_tree: float = setting(2000.0, "megabytes of the largest tree that is sent", above=0)
    keep: float = setting(
        20.0, "megabytes of the largest code that is kept with the experiment, for rerun", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.link:
            if name.startswith(("/", "~")) or not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise UsageError(f"sync.link has {name!r}; it must be a path below the directory")
        for name in self.outputs:
            parts = name.strip("/").split("/")
            ups = next((at for at, word in enumerate(parts) if word != ".."), len(parts))
            inside = ups <= MOST_ABOVE and parts[ups:] not in ([], [""], ["."])
            if name.startswith(("/", "~")) or ".." in parts[ups:] or not inside:
                raise UsageError(
                    f"sync.outputs has {name!r}; it must be a directory below the one that you"
                    " launch in, or beside that: ../outputs"
                )


@dataclass(frozen=True)
class Config:
    """One file of config/, resolved."""

    launch: Launch = field(default_factory=Launch)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    nccl: NcclConfig = field(default_factory=NcclConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    env: dict[str, str] = setting({}, "more environment variables for every rank")

    def __post_init__(self) -> None:
        # A value that another value makes meaningless is a mistake.
        raise_problems(unread_values(vars(self)))
        model_and_data(self)
        times(self)


# -- contradictions, refused with the names of both keys -------------------------------------------


def unread_values(sections: Mapping[str, Any]) -> list[UsageError]:
    """Find the values that nothing reads, as far as both sections are there."""
    problems = []
    for section, inner in sections.items():
        for item in dataclasses.fields(inner) if dataclasses.is_dataclass(inner) else ():
            conditions = item.metadata.get("only", ()) if changed(inner, item.name) else ()
            for name, values in conditions:
                other, key = name.split(".")
                value = getattr(sections[other], key) if other in sections else None
                if value is not None and value not in values:
                    wanted = " or ".join(str(allowed).lower() for allowed in values)
                    what = (
                        f"{section}.{item.name} is set, but nothing reads it while {name} is"
                        f" {str(value).lower()}; it is for {wanted}"
                    )
                    problems.append(UsageError(what))
    loader = sections.get("dataloader")
    if loader and changed(loader, "prefetch_factor") and not loader.num_workers:
        what = (
            "dataloader.prefetch_factor is set, but dataloader.num_workers is 0: nothing loads in"
            " advance"
        )
        problems.append(UsageError(what))
    return problems


def changed(section: Any, name: str) -> bool:
    """Return whether a value was set to something other than its default."""
    (item,) = (item for item in dataclasses.fields(section) if item.name == name)
    factory = item.default_factory
    default = item.default if factory is dataclasses.MISSING else factory()
    return bool(getattr(section, name) != default)


def model_and_data(config: Config) -> None:
    model, data = config.model, config.dataset
    if model.kind == "ranking" and data.kind not in ("synthetic", "target"):
        raise UsageError(
            f"model.kind is 'ranking', which cannot learn from dataset.kind {data.kind!r}",
            "set dataset.kind to synthetic, or dataset.target to your own",
        )
    if model.kind == "ranking" and changed(data, "sequence_length"):
        raise UsageError("dataset.sequence_length is set, but model.kind is 'ranking'")
    if model.kind == "decoder" and data.kind == "library" and model.vocab_size < 256:
        raise UsageError(
            f"model.vocab_size is {model.vocab_size}, but dataset.kind 'library' is bytes, of which"
            " there are 256"
        )
    if data.eval_path and changed(data, "eval_fraction"):
        raise UsageError("dataset.eval_fraction and dataset.eval_path are both set")
    evaluates = config.training.eval_steps or config.training.eval_seconds
    if evaluates and not (data.eval_fraction or data.eval_path or data.target):
        raise UsageError("training.eval_* asks for an evaluation, but dataset.eval_fraction is 0")


def times(config: Config) -> None:
    scheduler, profiling, steps = config.scheduler, config.profiling, config.training.max_steps
    total = scheduler.total_steps or steps
    rising, falling = scheduler.warmup_steps or 0, scheduler.decay_steps or 0
    if rising + falling > total:
        raise UsageError(
            f"scheduler.warmup_steps ({rising}) and scheduler.decay_steps ({falling}) are more than"
            f" scheduler.total_steps ({total}; training.max_steps where it is not set)"
        )
    traced = profiling.within(steps).steps_before + profiling.active
    if profiling.enabled and traced > steps:
        raise UsageError(
            f"profiling.wait + warmup + active are {traced} steps, but training.max_steps is"
            f" {steps}: the trace would never be written"
        )
