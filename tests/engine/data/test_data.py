"""The order of the samples, the sources they come from, and how ranks and workers share them."""

import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine.data import sources, tokens
from orchestrator.engine.data.rounds import Order
from orchestrator.engine.ranks.ranks import Ranks
from tests.node.running import alive, wait_until

CPU = torch.device("cpu")


def config(**sections: Any) -> Config:
    return parse.build_dataclass(Config, sections)


# -- order --------------------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(1, 70),
    st.integers(1, 12).flatmap(lambda p: st.sampled_from([2**p - 1, 2**p, 2**p + 1])),
)


@given(SIZES, st.integers(0, 2**64), st.integers(0, 5))
def test_epoch_has_every_sample_once(size: int, seed: int, epoch: int) -> None:
    found = Order(size, seed, shuffle=True).indices(epoch * size, size)
    assert sorted(found) == list(range(size))


# -- sources ------------------------------------------------------------------------------------


def test_library_text_is_split_and_its_end_held_out() -> None:
    text = sources.library_text()
    train, held_out = sources.load_sources(config(dataset={"sequence_length": 50}))
    pieces = (len(text) - 1) // 50
    assert held_out is not None
    assert len(held_out) == round(pieces * 0.05)
    assert len(train) + len(held_out) == pieces
    batch = train.batch([3, 0], 0)
    assert bytes(batch["inputs"][0].tolist()) == text[150:200]
    assert bytes(batch["targets"][0].tolist()) == text[151:201]
    assert bytes(batch["inputs"][1].tolist()) == text[:50]
    assert (
        bytes(held_out.batch([len(held_out) - 1], 0)["inputs"][0].tolist())
        == (text[(pieces - 1) * 50 : pieces * 50])
    )
    assert batch["inputs"].is_contiguous() and batch["targets"].is_contiguous()


def test_too_short_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "library_text", lambda: b"")
    with pytest.raises(CheckFailed, match=r"sequence_length 64 \+ 1: that is 0 samples"):
        sources.load_sources(config())
    monkeypatch.setattr(sources, "library_text", lambda: b"x" * 70)
    with pytest.raises(CheckFailed, match=r"that is 1 sample, .* besides the one that is held out"):
        sources.load_sources(config())


def test_synthetic_tokens_follow_strides() -> None:
    model = {"vocab_size": 11}
    train, held_out = sources.load_sources(config(dataset={"kind": "synthetic"}, model=model))
    assert held_out is not None
    assert (len(train), len(held_out)) == (9500, 500)
    batch = train.batch(range(300), 0)
    assert batch["inputs"].shape == (300, 64)
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    strides = (batch["targets"] - batch["inputs"]) % 11
    assert (strides == strides[:, :1]).all()
    assert set(strides[:, 0].tolist()) == {1, 2, 3, 4}
    assert set(batch["inputs"][:, 0].tolist()) == set(range(11))
    again = train.batch([7], 99)
    assert torch.equal(again["inputs"][0], batch["inputs"][7])


def test_synthetic_clicks_fit_ranking_model() -> None:
    wanted = config(model={"kind": "ranking", "vocab_size": 20}, dataset={"kind": "synthetic"})
    batch = sources.load_sources(wanted)[0].batch(range(400), 0)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "sparse": (400, 8),
        "dense": (400, 4, 16),
        "label": (400,),
    }
    assert (batch["sparse"].min(), batch["sparse"].max()) == (0, 19)
    assert abs(batch["dense"].mean()) < 0.05
    assert batch["dense"].std().item() == pytest.approx(1, abs=0.05)


# -- files of tokens ----------------------------------------------------------------------------


def token_file(path: Path, values: Sequence[int], vocab_size: int) -> Path:
    kind = tokens.dtype_for(vocab_size)
    with path.open("wb") as file:
        tokens.write_header(file, tokens.Header(kind, vocab_size, len(values)))
        width = tokens.WIDTHS[kind]
        file.write(b"".join(value.to_bytes(width, "little") for value in values))
    return path


@pytest.mark.parametrize("vocab_size", [300, 65536, 65537, 200_000])
def test_token_file_returns_what_was_written(tmp_path: Path, vocab_size: int) -> None:
    values = [(i * 7919) % vocab_size for i in range(1000)]
    values[16] = vocab_size - 1
    path = token_file(tmp_path / "t.bin", values, vocab_size)
    words = {"path": str(path), "sequence_length": 9, "eval_fraction": 0.1}
    wanted = config(dataset=words, model={"vocab_size": vocab_size})
    train, held_out = sources.load_sources(wanted)
    assert held_out is not None
    assert (len(train), len(held_out)) == (100, 11)
    for source in (train, pickle.loads(pickle.dumps(train))):
        batch = source.batch([1, 99], 0)
        assert batch["inputs"].tolist() == [values[9:18], values[891:900]]
        assert batch["targets"].tolist() == [values[10:19], values[892:901]]
    # A worker maps the file and does not receive a copy.
    assert len(pickle.dumps(train)) < 2000
    assert (
        path.read_bytes().splitlines()[0].strip()
        == json.dumps(
            {
                "format": "orchestrator tokens 1",
                "dtype": "uint16" if vocab_size <= 65536 else "uint32",
                "vocab_size": vocab_size,
                "count": 1000,
            }
        ).encode()
    )


def test_eval_path_is_held_out(tmp_path: Path) -> None:
    train = token_file(tmp_path / "train.bin", range(100), 256)
    held_out = token_file(tmp_path / "eval.bin", range(50), 256)
    words = {"path": str(train), "eval_path": str(held_out), "sequence_length": 9}
    found = sources.load_sources(config(dataset=words))
    assert [len(source or ()) for source in found] == [11, 5]


def broken_files(directory: Path) -> dict[str, Path]:
    good = token_file(directory / "good.bin", range(100), 256).read_bytes()
    files = {
        "text": b"once upon a time\n",
        "empty": b"",
        "short": good[:-1],
        "long": good + b"\0\0",
        "header": good[:100],
        "other": good.replace(b"tokens 1", b"tokens 2"),
        "list": b"[]".ljust(600),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return {name: directory / name for name in [*files, "missing"]}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text", "is not a file of tokens"),
        ("empty", "is not a file of tokens"),
        ("header", "is not a file of tokens"),
        ("other", "is not a file of tokens"),
        ("list", "is not a file of tokens"),
        ("short", "has 711 bytes, but its header promises 712: it was truncated"),
        ("long", "has 714 bytes, but its header promises 712"),
        ("missing", "cannot be read: No such file or directory"),
    ],
)
def test_invalid_token_file_is_refused(tmp_path: Path, name: str, words: str) -> None:
    path = broken_files(tmp_path)[name]
    with pytest.raises(CheckFailed) as error:
        sources.load_sources(config(dataset={"path": str(path)}))
    assert str(path) in error.value.what and words in error.value.what
    assert "python scripts/make_tokens.py" in error.value.fix


def test_tokens_beyond_vocabulary_are_refused(tmp_path: Path) -> None:
    path = token_file(tmp_path / "t.bin", range(200), 257)
    words = "vocabulary of 257, but model.vocab_size is 256"
    with pytest.raises(UsageError, match=words) as error:
        sources.load_sources(config(dataset={"path": str(path)}))
    assert "set model.vocab_size to 257" in error.value.fix
    wanted = config(dataset={"path": str(path), "sequence_length": 200}, model={"vocab_size": 257})
    with pytest.raises(CheckFailed, match="has 200 tokens, but one sample needs 201"):
        sources.load_sources(wanted)


# -- the user's own -----------------------------------------------------------------------------


class Noisy(Dataset[dict[str, Tensor]]):
    """Draws from all three random states."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        import numpy as np

        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
        return {"index": torch.tensor(index), "drawn": torch.tensor(drawn, dtype=torch.float64)}


class Ragged(Noisy):
    def collate(self, samples: list[dict[str, Tensor]]) -> list[int]:
        return [int(sample["index"]) for sample in samples]


def noisy(split: str, size: int = 10) -> Noisy | None:
    return Noisy(size) if split == "train" else None


def ragged(split: str) -> Ragged:
    return Ragged(10)


def endless(split: str) -> Any:
    return iter([])


def nothing(split: str) -> list[int] | None:
    return [] if split == "train" else None


def own(name: str, **sections: Any) -> Config:
    model = {"target": "tests.engine.data.test_data:noisy"}
    return config(
        model=model, dataset={"target": f"tests.engine.data.test_data:{name}"}, **sections
    )


def test_augmentation_depends_on_position_alone() -> None:
    import numpy as np

    source = sources.load_sources(own("noisy"))[0]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    whole = source.batch([4, 5, 6], 20)
    part = source.batch([5, 6], 21)
    assert torch.equal(whole["drawn"][1:], part["drawn"])
    assert whole["index"].tolist() == [4, 5, 6]
    assert not torch.equal(source.batch([4], 30)["drawn"], whole["drawn"][:1])  # another epoch
    seeded = sources.load_sources(own("noisy", training={"seed": 1}))[0]
    assert not torch.equal(seeded.batch([4], 20)["drawn"], whole["drawn"][:1])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_dataset_may_collate_its_own_batches() -> None:
    assert sources.load_sources(own("ragged"))[0].batch([2, 7], 0) == [2, 7]


@pytest.mark.parametrize(
    ("name", "steps", "words"),
    [
        (
            "endless",
            None,
            "returned a list_iterator, not a dataset that has __len__ and __getitem__",
        ),
        ("nothing", None, "returned a dataset without samples for 'train'"),
        ("noisy", 5, "returned None for split='eval'"),
    ],
)
def test_unusable_dataset_is_refused(name: str, steps: int | None, words: str) -> None:
    with pytest.raises((UsageError, CheckFailed)) as error:
        sources.load_sources(own(name, training={"eval_steps": steps}))
    assert words in error.value.what


def tokens_of(split: str, values: list[int], name: str = "targets") -> list[dict[str, Tensor]]:
    return [{"inputs": torch.tensor([1, 2]), name: torch.tensor(values)}]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"values": [5, -100]}, None),
        ({"values": [5, 256]}, "gave 256 among 'targets', but model.vocab_size is 256"),
        ({"values": [5, -1]}, "gave -1 among 'targets'"),
        (
            {"values": [-100], "name": "inputs"},
            "a batch of inputs; model.kind 'decoder' needs",
        ),
    ],
)
def test_batch_unfit_for_built_in_model_is_refused(args: dict[str, Any], words: str | None) -> None:
    target = {"target": "tests.engine.data.test_data:tokens_of", "args": args}
    source = sources.load_sources(config(dataset=target))[0]
    if words is None:
        assert source.batch([0], 0)["targets"].tolist() == [args["values"]]
        return
    with pytest.raises(CheckFailed) as error:
        source.batch([0], 0)
    assert words in error.value.what


# -- batches ------------------------------------------------------------------------------------


class Numbers:
    """A sample is its own number."""

    def __init__(self, size: int) -> None:
        self.size, self.name = size, "numbers"

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], position: int) -> dict[str, Tensor]:
        places = torch.arange(position, position + len(indices))
        return {"index": torch.tensor(indices), "position": places}


def feed(
    source: Any,
    wanted: Config,
    rank: int = 0,
    world: int = 1,
    position: int = 0,
    *,
    held: bool = False,
) -> Any:
    kind = sources.HeldOutSamples if held else sources.TrainingSamples
    return kind(source, wanted, Ranks(rank, world, 0, CPU, ())).epoch(0, position)


def first(count: int, found: Any) -> list[Any]:
    return list(itertools.islice(found, count))


@pytest.mark.parametrize("size", [5, 24, 100])
def test_ranks_share_batches_independent_of_world_size(size: int) -> None:
    source, order = Numbers(size), Order(size, 0, shuffle=True)
    expected = order.indices(0, 120)
    for world in (1, 2, 3, 4):
        wanted = config(training={"batch_size": 12 // world})
        feeds = [feed(source, wanted, rank, world) for rank in range(world)]
        found: list[int] = []
        for _ in range(10):
            for batch in map(next, feeds):
                assert batch.data["index"].tolist() == batch.ids
                assert batch.data["position"][0] == len(found)
                found += batch.ids
        assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_feed_resumes_at_any_position(workers: int) -> None:
    loader = {"num_workers": workers}
    wanted = config(training={"batch_size": 3}, dataloader=loader)
    whole = first(12, feed(Numbers(23), wanted, 1, 2))
    later = first(7, feed(Numbers(23), wanted, 1, 2, 5 * 6))
    assert [batch.ids for batch in later] == [batch.ids for batch in whole[5:]]
    # And with another number of ranks.
    alone = config(training={"batch_size": 6}, dataloader=loader)
    found = first(7, feed(Numbers(23), alone, position=5 * 6))
    assert [batch.ids[3:] for batch in found] == [batch.ids for batch in later]


def test_workers_yield_same_as_rank() -> None:
    source = sources.load_sources(own("noisy"))[0]
    state = torch.get_rng_state()
    found = []
    for workers in (0, 1, 2):
        more = {"prefetch_factor": 3} if workers else {}
        wanted = own("noisy", dataloader={"num_workers": workers, **more})
        found.append(first(8, feed(source, wanted)))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one.ids == two.ids
            assert torch.equal(one.data["drawn"], two.data["drawn"])
    assert torch.equal(torch.get_rng_state(), state)


ORPHANS = """
import itertools, os, sys, time
import torch.utils.data._utils.worker as worker
worker.MP_STATUS_CHECK_INTERVAL = 0.1  # of 5 seconds, to have the test end sooner
from tests.engine.data.test_data import Numbers, config, feed
own = feed(Numbers(100), config(dataloader={"num_workers": 2}))
next(own)
print(*[child.pid for child in __import__("multiprocessing").active_children()], flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_workers_end_with_killed_rank() -> None:
    command = [sys.executable, "-c", ORPHANS]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        workers = [int(word) for word in rank.stdout.readline().split()]
        assert len(workers) == 2
        # A worker may still be starting.
        wait_until(lambda: all(map(ignores_interrupts, workers)))
        # A Ctrl-C in the terminal sends this signal, which the rank may ignore.
        os.kill(workers[0], signal.SIGINT)
        time.sleep(0.2)
        assert all(map(alive, workers))
        rank.kill()
    wait_until(lambda: not any(map(alive, workers)), "the end of the workers")


def ignores_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = status.partition("SigIgn:")[2].split()[0]
    return bool(int(ignored, 16) & 1 << (signal.SIGINT - 1))


# -- evaluation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [1, 5, 12, 25])
def test_held_out_samples_are_counted_once(size: int, workers: int) -> None:
    for world in (1, 2, 3) if not workers else (2,):
        training = {"batch_size": 4}
        wanted = config(training=training, dataloader={"num_workers": workers})
        found = [list(feed(Numbers(size), wanted, rank, world, held=True)) for rank in range(world)]
        assert {len(batches) for batches in found} == {-(-size // (4 * world))}
        counted = []
        for turn in zip(*found, strict=True):
            for batch in turn:
                assert 1 <= len(batch.ids) <= 4
                assert batch.data["index"].tolist() == batch.ids
                counted += batch.ids if batch.real else []
        assert counted == list(range(size))


def test_eval_batches_shortens_evaluation() -> None:
    wanted = config(training={"batch_size": 4, "eval_steps": 1, "eval_batches": 2})
    found = list(feed(Numbers(100), wanted, 1, 3, held=True))
    assert [batch.ids for batch in found] == [[4, 5, 6, 7], [16, 17, 18, 19]]
    assert len(list(feed(Numbers(5), wanted, 1, 3, held=True))) == 1
