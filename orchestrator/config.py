"""YAML + overrides -> frozen dataclasses. An unknown key is an error that names the nearest.

The classes are the reference: a key exists because a field does, and a field exists because
something honours it. Used by the head (launch) and by every rank (engine).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.errors import UsageError, nearest

T = TypeVar("T")

VARIABLES = ("nccl", "env")  # the sections that hold the environment of the ranks


@dataclass(frozen=True)
class Launch:
    """How a job is started. Command-line options of the same names win over these."""

    name: str = "multinode"  # experiments/<name>_YYYYMMDD_HHMMSS
    nproc: int | None = None  # ranks per node where the list says no slots=; else the GPUs found
    master_port: int | None = None  # 29500, or the next free one
    start: str = "fork"  # fork: ranks forked from a torchrun that has imported torch; or plain
    python: str | None = None  # on nodes without python=
    workdir: str | None = None  # on nodes without workdir=; else the directory of the launch
    hook: str | None = None  # a shell file whose exports are applied on each node
    connect_timeout: float = 10.0  # seconds to reach a node
    node_loss_timeout: float = 60.0  # seconds without a node before the job is ended
    grace: float = 30.0  # seconds between asking the ranks to stop and killing them
    strict_host_keys: bool = False  # refuse hosts that known_hosts does not list

    def __post_init__(self) -> None:
        one_of("launch.start", self.start, ("fork", "plain"))
        if self.nproc is not None:
            at_least("launch.nproc", self.nproc, 1)
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise UsageError(f"launch.master_port is {self.master_port}: a port is 1 to 65535")
        for name in ("connect_timeout", "node_loss_timeout", "grace"):
            at_least(f"launch.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class Training:
    """The training run of the built-in engine."""

    max_steps: int = 100
    batch_size: int = 8  # sequences per rank and step
    seq_len: int = 64
    seed: int = 0
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "seq_len", "log_every"):
            at_least(f"training.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class Model:
    """A small decoder language model over bytes."""

    num_layers: int = 2
    model_dim: int = 64
    num_heads: int = 4

    def __post_init__(self) -> None:
        for name in ("num_layers", "model_dim", "num_heads"):
            at_least(f"model.{name}", getattr(self, name), 1)
        if self.model_dim % self.num_heads:
            raise UsageError(
                f"model.model_dim ({self.model_dim}) is not a multiple of"
                f" model.num_heads ({self.num_heads})"
            )


@dataclass(frozen=True)
class Optimizer:
    """AdamW; the learning rate warms up over a twentieth of the steps and falls by a cosine."""

    lr: float = 3e-3  # at its highest
    weight_decay: float = 0.01
    grad_clip: float = 1.0  # largest global norm of the gradients; 0 leaves them as they are

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "grad_clip"):
            at_least(f"optimizer.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class Fsdp:
    """How parameters are spread over the ranks."""

    sharding_strategy: str = "hybrid_shard"  # shard within a node, replicate across; or full_shard

    def __post_init__(self) -> None:
        one_of("fsdp.sharding_strategy", self.sharding_strategy, ("hybrid_shard", "full_shard"))


@dataclass(frozen=True)
class Config:
    """One file of config/, resolved."""

    launch: Launch = field(default_factory=Launch)
    training: Training = field(default_factory=Training)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    fsdp: Fsdp = field(default_factory=Fsdp)
    nccl: dict[str, str] = field(default_factory=dict)  # NCCL_* that win over computed ones
    env: dict[str, str] = field(default_factory=dict)  # more environment for every rank


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(
            f"{name} is {value!r}; it can be {', '.join(allowed)}{nearest(value, allowed)}"
        )


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise UsageError(f"{name} is {value:g}; it must be at least {least:g}")


def load(file: Path | None, overrides: Sequence[str] = ()) -> Config:
    """A config file (or the defaults) with `section.key=value` overrides on top."""
    data: dict[str, Any] = {}
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"config {file} cannot be read: {reason}") from error
        loaded = _parse(text, f"config {file}")
        if not isinstance(loaded, (dict, type(None))):
            raise UsageError(f"config {file} must hold sections such as `training:`")
        data = loaded or {}
        words = _parse(text, f"config {file}", as_written=True) if loaded else {}
        data.update({section: words[section] for section in VARIABLES if section in data})
    for override in overrides:
        _override(data, override)
    return build(Config, data, "")


def _parse(text: str, what: str, *, as_written: bool = False) -> Any:
    """YAML. As written: 3.10 is no number, which would be 3.1 in the environment."""
    import yaml

    class AsWritten(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [(tag, regexp) for tag, regexp in known if tag.endswith((":bool", ":null"))]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        return yaml.load(text, Loader=AsWritten if as_written else yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{what} is not valid YAML: {error}") from error


def dump(config: Config) -> str:
    import yaml

    return str(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def _override(data: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise UsageError(f"--set {text}: write section.key=value, such as training.max_steps=100")
    *sections, key = path.strip().split(".")
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        if not isinstance(data[section], dict):
            raise UsageError(f"--set {text}: {section!r} is a value, not a section")
        data = data[section]
    data[key] = _parse(value, f"--set {text}", as_written=path.split(".")[0] in VARIABLES)


def build(cls: type[T], data: Any, where: str) -> T:
    """A dataclass from nested mappings; every key must be a field and every value of its type."""
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise UsageError(f"{where or 'the config'} must hold keys, not {data!r}")
    hints = typing.get_type_hints(cls)
    names = [item.name for item in dataclasses.fields(typing.cast(Any, cls))]
    values = {}
    for key, value in data.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in names:
            raise UsageError(f"unknown key {name!r} in the config{nearest(str(key), names)}")
        values[key] = _value(hints[key], value, name)
    return cls(**values)


def _value(kind: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type[Any], kind), value, name)
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and types.NoneType in options:
        return None
    wanted = next(option for option in options if option is not types.NoneType)
    if typing.get_origin(wanted) is dict:
        return _variables(value, name)
    if wanted is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)  # YAML reads 3e-4 as text
    if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise UsageError(f"{name} must be {words[wanted]}, not {value!r}")
    return value


def _variables(value: Any, name: str) -> dict[str, str]:
    """Environment variables; true and false become the 1 and 0 that they mean there."""
    if not isinstance(value, (Mapping, types.NoneType)):
        raise UsageError(f"{name} must hold NAME: value pairs, not {value!r}")
    found = {}
    for key, inner in (value or {}).items():
        if not (isinstance(key, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key)):
            raise UsageError(f"{name}: {key!r} cannot name a variable")  # a bare NO is False
        if isinstance(inner, (Mapping, list)):
            raise UsageError(f"{name}.{key} must be one value, not {inner!r}")
        found[key] = _text(inner)
    return found


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)
