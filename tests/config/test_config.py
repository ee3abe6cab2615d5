import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.common.errors import EXIT_USAGE, UsageError
from orchestrator.config.launch import Launch
from orchestrator.config.load import config_as_data, load_config
from orchestrator.config.parse import build_dataclass
from orchestrator.config.resolved import yaml_of
from orchestrator.config.schema import Config, NcclConfig, ProfilingConfig

ROOT = Path(__file__).parents[2]


def read(tmp_path: Path, text: str, *overrides: str) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, overrides)


def refused(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(UsageError) as error:
        load_config(file, overrides)
    assert error.value.exit_code == EXIT_USAGE
    return error.value.what


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_load(path: Path) -> None:
    assert isinstance(load_config(path), Config)


@pytest.mark.parametrize("text", ["launch:\ntraining:\nenv:\nnccl:\n", "{}"])
def test_empty_config_means_defaults(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == Config() == load_config(None)


def test_file_is_read(tmp_path: Path) -> None:
    text = """
launch: {nproc: 2, grace: 5, hook: null, strict_host_keys: true, name: größe}
training:
  max_steps: 7
optimizer: {lr: 3e-4}
fsdp: {sharding_strategy: full_shard}
"""
    found = read(tmp_path, text)
    assert found.launch == Launch(nproc=2, grace=5.0, strict_host_keys=True, name="größe")
    assert isinstance(found.launch.grace, float)
    assert found.training.max_steps == 7
    assert found.optimizer.lr == 3e-4
    assert found.fsdp.sharding_strategy == "full_shard"


def test_variables_keep_their_text(tmp_path: Path) -> None:
    """A version is no number, a time is no count of seconds; yes and no are what they mean."""
    text = """
env:
  VERSION: 3.10
  TIME: 12:30:00
  ZEROS: 007
  HEX: 0x10
  DATE: 2024-01-01
  SMALL: 1e-5
  NONE:
  ENABLED: yes
  DISABLED: false
  QUOTED: "true"
  LONG: "two\\nlines"
  é: 1
nccl: {NCCL_DEBUG: INFO, NCCL_IB_DISABLE: 1}
model: {target: "my:model", args: {since: 2024-01-01}}
"""
    with pytest.raises(UsageError, match="'é' cannot name a variable"):
        read(tmp_path, text)
    found = read(tmp_path, text.replace("  é: 1\n", ""))
    assert found.env == {
        **{"VERSION": "3.10", "TIME": "12:30:00", "ZEROS": "007", "HEX": "0x10"},
        **{"DATE": "2024-01-01", "SMALL": "1e-5", "NONE": "", "ENABLED": "1", "DISABLED": "0"},
        **{"QUOTED": "true", "LONG": "two\nlines"},
    }
    assert found.nccl.variables == {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"}
    # The ranks get their config as JSON, which has no dates.
    assert found.model.args == {"since": "2024-01-01"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("[1, 2]", "must hold sections such as `training:`"),
        ("just words", "must hold sections"),
        ("a: [", "is not valid YAML"),
        ("a: b: c", "is not valid YAML"),
        ("training: 5", "training must hold keys, not 5"),
        ("training: [1]", "training must hold keys"),
        ("trainig: {}", "unknown key 'trainig' in the config; did you mean 'training'?"),
        ("training: {max_step: 5}", "unknown key 'training.max_step' in the config; did you mean"),
        ("1: 2", "unknown key '1'"),
        ("null: 2", "unknown key 'None'"),
        ("training: {max_steps: many}", "training.max_steps must be a whole number, not 'many'"),
        ("training: {max_steps: 5.5}", "must be a whole number, not 5.5"),
        ("training: {max_steps: true}", "must be a whole number, not True"),
        ("training: {max_steps: null}", "must be a whole number, not None"),
        ("training: {max_steps: 0}", "training.max_steps is 0; it must be at least 1"),
        ("launch: {grace: soon}", "launch.grace must be a number, not 'soon'"),
        ("launch: {grace: true}", "launch.grace must be a number, not True"),
        ("launch: {grace: -1}", "--grace (launch.grace in a config) is -1; it must be at least 0"),
        ("launch: {grace: .inf}", "launch.grace must be a number, not inf"),
        ("launch: {connect_timeout: 1e300}", "connect_timeout must be a number, not 1e+300"),
        ("launch: {nproc: 100000}", "is 100000; it must be at least 1 and at most 9999"),
        ("launch: {grace: .nan}", "launch.grace must be a number, not nan"),
        ("launch: {nnodes: 1.5}", "launch.nnodes is '1.5', which is not a number of nodes"),
        (f"launch: {{grace: 1{'0' * 400}}}", "launch.grace must be a number"),
        ("launch: {strict_host_keys: 1}", "launch.strict_host_keys must be true or false, not 1"),
        ("launch: {sync: off}", "launch.sync must be text, not False"),
        ("launch: {name: 5}", "launch.name must be text, not 5"),
        ("launch: {python: [a]}", "launch.python must be text"),
        ("launch: {nproc: 0}", "--nproc (launch.nproc in a config) is 0; it must be at least 1"),
        ("launch: {master_port: 65536}", "is 65536; it must be at least 1 and at most 65535"),
        ("launch: {start: frok}", "launch.start is 'frok'; it can be fork, plain; did you mean"),
        ("model: {model_dim: 30}", "model.model_dim (30) is not a multiple of model.num_heads (4)"),
        ("env: [A]", "env must hold NAME: value pairs"),
        ("env: {A: [1]}", "env.A must be one value, not"),
        ("nccl: {A: {B: c}}", "nccl.A must be one value, not"),
        ("nccl: [A]", "nccl must hold keys"),
        ("nccl: {profil: auto}", "unknown key 'nccl.profil' in the config; did you mean 'profile'"),
        (
            "nccl: {nccl_debug: INFO}",
            "'nccl.nccl_debug' in the config; variables are written in capitals",
        ),
        ("nccl: {variables: [1]}", "nccl must hold NAME: value pairs"),
        ("nccl: {profile: rocee}", "nccl.profile is 'rocee'; it can be auto, infiniband, roce,"),
        ("nccl: {profile: rocee}", "did you mean 'roce'?"),
        ("launch: {profile: roce}", "did you mean 'nccl.profile'?"),
        ("env: {A B: 1}", "env: 'A B' cannot name a variable"),
        ("env: {A=B: 1}", "env: 'A=B' cannot name a variable"),
        ("env: {NO: 1}", "env: False cannot name a variable"),
        ("env: {1A: 1}", "env: '1A' cannot name a variable"),
    ],
)
def test_load_refuses_invalid_config(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert words in refused(file=tmp_path / "config.yaml")


def test_unquoted_yaml_boolean_is_explained(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("launch: {sync: off}")
    with pytest.raises(UsageError) as error:
        load_config(tmp_path / "config.yaml")
    assert "put the word in quotes" in error.value.fix
    (tmp_path / "config.yaml").write_text("launch: {sync: 'off'}")
    assert load_config(tmp_path / "config.yaml").launch.sync == "off"


def test_unknown_key_lists_keys_of_section() -> None:
    with pytest.raises(UsageError) as error:
        load_config(None, ["checkpoint.evry=5"])
    assert error.value.fix.startswith("checkpoint has steps, seconds, at_end, directory, keep, ")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(file=tmp_path / "none.yaml")
    assert "Is a directory" in refused(file=tmp_path)
    (tmp_path / "latin").write_bytes(b"name: gr\xf6\xdfe")
    assert "cannot be read" in refused(file=tmp_path / "latin")
    (tmp_path / "nul").write_bytes(b"a: \0")
    assert "not valid YAML" in refused(file=tmp_path / "nul")


# -- --set ------------------------------------------------------------------------------------


def test_overrides_win_and_last_one_most(tmp_path: Path) -> None:
    text = "training: {max_steps: 5, seed: 1}\nlaunch:\n"
    found = read(
        tmp_path, text,
        "training.max_steps=6", "training.max_steps=7", "optimizer.lr=1e-3", "launch.nproc=2",
    )  # fmt: skip
    assert (found.training.max_steps, found.training.seed) == (7, 1)
    assert (found.optimizer.lr, found.launch.nproc) == (1e-3, 2)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("launch.nproc=null", "launch", "nproc", None),
        ("launch.nproc=", "launch", "nproc", None),
        ("launch.strict_host_keys=true", "launch", "strict_host_keys", True),
        ("launch.hook=a=b.sh", "launch", "hook", "a=b.sh"),
        ("launch.node_loss_timeout=1e6", "launch", "node_loss_timeout", 1e6),
        (" training.seed =3", "training", "seed", 3),
    ],
)
def test_override_sets_value(override: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load_config(None, [override]), section), key) == value


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("env.A=1.10", "1.10"), ("env.A=", ""), ("env.A=yes", "1"), ("env.A='yes'", "yes"),
        ("env.A=a=b", "a=b"), ("env.A=12:30", "12:30"), ("nccl.A=INFO", "INFO"),
    ],
)  # fmt: skip
def test_override_sets_variable(override: str, value: str) -> None:
    found = load_config(None, [override])
    assert {**found.env, **found.nccl.variables} == {"A": value}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.max_steps", "write section.key=value"),
        ("=5", "write section.key=value"),
        ("", "write section.key=value"),
        ("training=5", "training must hold keys, not 5"),
        ("training.max_steps=[", "--set training.max_steps=[ is not valid YAML"),
        ("env.A={", "--set env.A={ is not valid YAML"),
        ("training.max_steps.x=1", "must be a whole number"),
        ("training.maxsteps=1", "did you mean 'max_steps'?"),
        ("max_steps=1", "unknown key 'max_steps'"),
        (".=1", "unknown key"),
        ("env.A=[1]", "env.A must be one value"),
    ],
)
def test_invalid_override_is_refused(override: str, words: str) -> None:
    assert words in refused(override)


def test_override_below_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'max_steps' is a value, not a section"):
        read(tmp_path, "training: {max_steps: 5}", "training.max_steps.x=1")


# -- there and back ---------------------------------------------------------------------------

text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
capitals = st.from_regex(r"[A-Z][A-Z0-9_]{0,8}", fullmatch=True)
values = st.one_of(text, st.sampled_from(["yes", "1.10", "null", "~", ""]))


@given(
    env=st.dictionaries(names, values),
    nccl=st.dictionaries(capitals, values),
    name=text,
    grace=st.floats(0, 1e7),
    nproc=st.none() | st.integers(1, 99),
)
@settings(deadline=None, max_examples=10)
def test_dumped_config_loads_equal(
    tmp_path_factory: pytest.TempPathFactory,
    env: dict[str, str], nccl: dict[str, str], name: str, grace: float, nproc: int | None,
) -> None:  # fmt: skip
    """config.yaml of an experiment starts the same job; the spec brings the same to the ranks."""
    launch = Launch(name=name, grace=grace, nproc=nproc)
    config = Config(launch=launch, env=env, nccl=NcclConfig("roce", nccl))
    file = tmp_path_factory.getbasetemp() / "config.yaml"
    file.write_text(yaml_of(config_as_data(config)), encoding="utf-8")
    assert load_config(file) == config
    assert build_dataclass(Config, json.loads(json.dumps(dataclasses.asdict(config))), "") == config


def test_every_field_has_default_of_its_type() -> None:
    """Each has a default of its own type, so that a config may say nothing of it."""
    for section in dataclasses.fields(Config):
        value: Any = getattr(Config(), section.name)
        if dataclasses.is_dataclass(value):
            rebuilt = build_dataclass(type(value), dataclasses.asdict(value), section.name)  # type: ignore[arg-type]
            assert rebuilt == value


# -- values that cannot both be meant --------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["distributed.bucket_cap_mb=5"], ["distributed.bucket_cap_mb", "hybrid_shard", "ddp"]),
        (["fsdp.sharding_strategy=ddp", "fsdp.cpu_offload=true"], ["fsdp.cpu_offload", "ddp"]),
        (["fsdp.sharding_strategy=full_shard", "fsdp.shard_size=2"], ["fsdp.shard_size", "full"]),
        (["model.kind=ranking", "dataset.kind=synthetic", "model.num_kv_heads=2"],
         ["model.num_kv_heads", "model.kind is ranking", "decoder"]),
        (["fsdp.param_dtype=bf16"], ["fsdp.param_dtype", "training.mixed_precision is fp32"]),
        (["fsdp.sharding_strategy=ddp", "training.mixed_precision=bf16", "fsdp.param_dtype=bf16"],
         ["fsdp.param_dtype", "fsdp.sharding_strategy is ddp"]),
        (["model.kind=ranking"], ["model.kind", "dataset.kind 'library'"]),
        (["model.kind=ranking", "model.target=a:b"], ["model.kind is 'ranking'", "model.target"]),
        (["dataset.kind=synthetic", "dataset.path=x"], ["dataset.kind", "dataset.path"]),
        (["dataset.kind=tokens"], ["dataset.kind is 'tokens'", "dataset.path"]),
        (["model.kind=target"], ["model.kind is 'target'", "model.target"]),
        (["model.vocab_size=100"], ["model.vocab_size is 100", "dataset.kind 'library'"]),
        (["model.num_kv_heads=3"], ["model.num_heads (4)", "model.num_kv_heads (3)"]),
        (["model.model_dim=12"], ["model.model_dim (12)", "model.num_heads (4)", "even"]),
        (["compile.mode=default"], ["compile.mode", "compile.enabled is false"]),
        (["optimizer.momentum=0.5"], ["optimizer.momentum", "optimizer.name is adamw"]),
        (["optimizer.name=sgd", "optimizer.eps=1"], ["optimizer.eps", "sgd"]),
        (["profiling.active=1"], ["profiling.active", "profiling.enabled is false"]),
        (["profiling.enabled=true", "training.max_steps=2"],
         ["profiling.wait + warmup + active", "training.max_steps is 2"]),
        (["profiling.enabled=true", "training.max_steps=3", "profiling.wait=1"],
         ["profiling.wait + warmup + active are 4", "training.max_steps is 3"]),
        (["scheduler.warmup_steps=101"], ["scheduler.warmup_steps (101)", "training.max_steps"]),
        (["scheduler.decay_steps=5"], ["scheduler.decay_steps", "scheduler.name is cosine", "wsd"]),
        (["dataloader.prefetch_factor=4"], ["prefetch_factor", "dataloader.num_workers is 0"]),
        (["training.eval_batches=4"], ["training.eval_batches", "training.eval_steps"]),
        (["training.eval_steps=4", "dataset.eval_fraction=0"], ["eval", "dataset.eval_fraction"]),
        (["distributed.static_graph=true", "distributed.find_unused_parameters=true",
          "fsdp.sharding_strategy=ddp"], ["static_graph", "find_unused_parameters"]),
    ],
)  # fmt: skip
def test_contradiction_names_both_keys(overrides: list[str], names: list[str]) -> None:
    words = refused(*overrides)
    for name in names:
        assert name in words


@pytest.mark.parametrize(
    ("profiling", "steps", "before"),
    [
        (ProfilingConfig(active=3), 100, (5, 2)),
        (ProfilingConfig(active=2), 9, (5, 2)),
        # A short run is traced from its beginning.
        (ProfilingConfig(active=2), 6, (2, 2)),
        (ProfilingConfig(active=2), 2, (0, 0)),
        (ProfilingConfig(active=2, wait=4), 7, (4, 1)),
        (ProfilingConfig(active=2, wait=0, warmup=0), 100, (0, 0)),
    ],
)
def test_profile_fits_short_run(
    profiling: ProfilingConfig, steps: int, before: tuple[int, int]
) -> None:
    decided = profiling.within(steps)
    assert (decided.wait, decided.warmup) == before
    assert decided.steps_before + decided.active <= steps


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.betas=[0.9]", "optimizer.betas must be a list of 2, not [0.9]"),
        ("optimizer.betas=[0.9, x]", "optimizer.betas[1] must be a number, not 'x'"),
        ("optimizer.betas=0.9", "optimizer.betas must be a list of 2, not 0.9"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas is 1; it must be at least 0 and below 1"),
        ("fsdp.wrap=Block", "fsdp.wrap must be a list, not 'Block'"),
        ("model.args=[1]", "model.args must hold keys, not [1]"),
        (
            "scheduler.min_lr_ratio=2",
            "scheduler.min_lr_ratio is 2; it must be at least 0 and at most 1",
        ),
        ("training.max_minutes=0", "training.max_minutes is 0; it must be above 0"),
        ("dataset.num_heads=5", "'dataset.num_heads' in the config; did you mean 'model.num_heads"),
        ("training.lr=5", "'training.lr' in the config; did you mean 'optimizer.lr'"),
        ("fsdp.sharding_strategy=HYBRID_SHARD", "did you mean 'hybrid_shard'"),
    ],
)
def test_value_of_wrong_type_is_refused(override: str, words: str) -> None:
    assert words in refused(override)


def test_lists_and_arguments_round_trip() -> None:
    words = ["optimizer.betas=[0.5, 0.75]", "fsdp.wrap=[A, B]", "model.target=a:b"]
    found = load_config(None, [*words, "model.args={x: {y: [1]}}"])
    assert build_dataclass(Config, yaml.safe_load(yaml_of(config_as_data(found)))) == found


def test_config_reference_is_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "scripts/config_reference.py", "--check"], check=True)


@pytest.mark.parametrize(
    ("written", "counts"),
    [
        ("nnodes: 4", (4, 4)),
        # YAML 1.1 reads this as 124, a number in base 60.
        ("nnodes: 2:4", (2, 4)),
        ("nnodes: '02:04'", (2, 4)),
        ("nnodes: null", None),
    ],
)
def test_nnodes_accepts_torchrun_notation(
    tmp_path: Path, written: str, counts: tuple[int, int] | None
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"launch:\n  {written}\n")
    assert load_config(file).launch.node_counts == counts
    if counts:
        value = written.partition(": ")[2]
        assert load_config(None, [f"launch.nnodes={value}"]).launch.node_counts == counts


@pytest.mark.parametrize("written", ["0", "4:2", "2:", ":2", "a", "2:4:6", "-1", "1.5", "99999"])
def test_invalid_nnodes_is_refused(written: str) -> None:
    with pytest.raises(UsageError, match=r"not a number of nodes|launch.nnodes must be"):
        load_config(None, [f"launch.nnodes={written}"])


def test_removed_key_is_answered() -> None:
    with pytest.raises(UsageError, match=r"sync\.fanout was removed") as refused:
        build_dataclass(Config, {"sync": {"fanout": 8}})
    assert "leave it out" in refused.value.fix
