"""Try what a training does to an optimizer, with many optimizers, in every layout of the ranks.

    python scripts/zoo.py [--only REGEX] [--layouts one,fs2] [--cases train,resume] [--double]
                          [--results FILE] [--limit SECONDS] [--at-once N]

Each answer is a line of FILE, and what is answered there is not tried again. Libraries that can be
imported are tried: pytorch_optimizer, timm, and those of LIBRARIES. The summary at the end counts
the answers:

    to the bit     as the same training without the interruption, or as the loop by hand
    parity         no further from the loop by hand than ten times what the order of a sum changes,
                   in fp32, or else in fp64
    as torch       plain torch cannot do it either: its own state_dict() loses something, or the
                   optimizer draws numbers, so that no two loops are alike
    refused        with a sentence, before the first step was done
    late           so, after it: by torch, of what the optimizer does in some steps only
    WRONG          further away
    BARE           an error that is none of ours, or no end within the limit
    none           the loop by hand fails, too (it needs a closure, another constructor ...)
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than such a training

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from orchestrator import Trainer  # noqa: E402
from orchestrator.common.errors import OrchestratorError  # noqa: E402
from tests.engine import worlds  # noqa: E402
from tests.engine.by_hand import (  # noqa: E402
    FIRST,
    NONE,
    STEPS,
    Make,
    by_hand,
    clipping,
    litter,
    made,
    resumed_by_hand,
    thaw,
    trained,
)  # fmt: skip
from tests.engine.programs import optimizers as own  # noqa: E402
from tests.engine.programs import several  # noqa: E402

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp2": (2, {"strategy": "ddp"}),
    "fs2": (2, {"strategy": "full_shard"}),
    "hybrid22": (4, {"strategy": "hybrid_shard", "config": {"fsdp": {"shard_size": 2}}}),
}
CASES = ("restart", "train", "resume", "skip", "hook", "unfreeze")
WORST = ("BARE", "WRONG", "late", "refused", "none", "as torch", "parity", "to the bit")
# Relative, of what always counts as equal to a loop by hand.
LEAST = {torch.float32: 1e-5, torch.float64: 1e-10}
BY_FUNCTION = "by a function of the parameters"  # as a refusal says that it works
CELL = "ZOO_CELL"
DECAY = 0.9


@dataclass(frozen=True)
class Answer:
    """What came of one case of an optimizer in a layout."""

    optimizer: str
    layout: str
    case: str
    kind: str
    distance: float = 0.0
    said: str = ""


# -- the optimizers --------------------------------------------------------------------------------


@functools.cache  # once, and not in each rank
def catalogue() -> dict[str, Make]:
    """Give each optimizer by name, as a function of the parameters."""
    found: dict[str, Make] = {}
    for add in (of_torch, of_programs, of_libraries, of_timm, of_pytorch_optimizer):
        try:
            found |= add()
        except Exception as error:  # noqa: BLE001 (code of libraries)
            print(f"{add.__name__} is left out: {sentence(error)}", file=sys.stderr)
    return found


def of_torch() -> dict[str, Make]:
    names = sorted(name for name in torch.optim.__all__ if name not in ("Optimizer", "SparseAdam"))
    kinds = {name: getattr(torch.optim, name) for name in names}
    made = {
        f"torch.{name}": functools.partial(kind, lr=1e-2)
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    return made | {
        "torch.Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=1e-2),
        "torch.SGD nesterov": functools.partial(sgd, lr=1e-2, momentum=0.9, nesterov=True),
        "torch.SGD dampening": functools.partial(sgd, lr=1e-2, momentum=0.9, dampening=0.5),
        "torch.SGD maximize": functools.partial(sgd, lr=1e-3, momentum=0.9, maximize=True),
        "torch.AdamW amsgrad, lr a tensor": lambda p: adamw(p, torch.tensor(1e-2), amsgrad=True),
        "torch.AdamW foreach": functools.partial(adamw, lr=1e-2, foreach=True),
        "torch.Adadelta lr 1": functools.partial(torch.optim.Adadelta, lr=1.0),
        "torch.RMSprop centered": functools.partial(
            torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True
        ),
    }


def of_programs() -> dict[str, Make]:
    kinds = (own.Switching, own.Finer, own.Rateless, own.Closed, own.Closing)
    more = {f"own.{kind.__name__}": kind for kind in kinds}
    more |= {"own.Muon beside AdamW": own.both, "own.Roots": own.Roots, "own.Coarse": own.Coarse}
    more |= dict.fromkeys(GAMES, own.both) | {AVERAGED: own.OWN["amsgrad"]}
    return {f"own.{name}": make for name, make in own.OWN.items()} | more


def of_libraries() -> dict[str, Make]:
    """Give every optimizer of each library, with its own settings but for those that need some."""
    found: dict[str, Make] = {}
    for name in LIBRARIES:
        try:
            library = importlib.import_module(name)
        except ImportError as error:
            print(f"{name} is left out: {sentence(error)}", file=sys.stderr)
            continue
        for kind in vars(library).values():
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                short = f"{name.partition('.')[0]}.{kind.__name__}"
                settings = {"lr": 1e-2, **NEEDED.get(short, {})}
                found[short] = functools.partial(kind, **settings)
    found.pop("torch_optimizer.Optimizer", None)
    return found


def of_timm() -> dict[str, Make]:
    from timm.optim import create_optimizer_v2

    def make(parameters: Any, name: str) -> Any:
        return create_optimizer_v2(list(parameters), opt=name, lr=1e-2)

    return {f"timm.{name}": functools.partial(make, name=name) for name in OF_TIMM}


def of_pytorch_optimizer() -> dict[str, Make]:
    from pytorch_optimizer import get_supported_optimizers, load_optimizer

    def make(parameters: Any, name: str) -> Any:
        return load_optimizer(name)(list(parameters), lr=1e-2, **CONSTRUCTED.get(name, {}))

    names = get_supported_optimizers()
    return {f"po.{name}": functools.partial(make, name=name) for name in names}


# Those that pytorch_optimizer has not, or has in another way.
OF_TIMM = ("lookahead_adamw", "lamb", "madgrad", "nadamw", "adopt", "laprop", "mars", "lion",
           "adabelief", "novograd", "adan", "lars", "sgdw", "adafactorbv", "muon", "cautious",
           "cadamw", "kron")  # fmt: skip
CONSTRUCTED: dict[str, dict[str, Any]] = {"ranger21": {"num_iterations": STEPS}}
LIBRARIES = ("schedulefree", "prodigyopt", "transformers.optimization", "torchao.optim",
             "bitsandbytes.optim", "torch_optimizer", "optimi", "lion_pytorch", "dadaptation",
             "came_pytorch", "adam_mini", "apollo_torch", "galore_torch", "sophia_opt",
             "kron_torch", "grokadamw", "adan_pytorch", "heavyball", "muon_fsdp2",
             "muonium")  # fmt: skip
SMALLER = {"lr": 1e-3}
# Two models by two losses, and the average of one's weights: compared with loops of their own.
GAMES: dict[str, dict[str, Any]] = {
    "several.GAN": {},
    "several.GAN, a generator in every third step": {"every": {"G": 3}},
}
AVERAGED = "several.EMA of AdamW"
NEEDED: dict[str, dict[str, Any]] = {
    "schedulefree.AdamWScheduleFree": {"warmup_steps": 3},
    "schedulefree.SGDScheduleFree": {"lr": 1e-1, "warmup_steps": 3},
    "prodigyopt.Prodigy": {"lr": 1.0},
    "transformers.Adafactor": {"relative_step": False},
    "bitsandbytes.SGD": {**SMALLER, "momentum": 0.9},
    "bitsandbytes.SGD8bit": {**SMALLER, "momentum": 0.9},
    "bitsandbytes.LARS": {**SMALLER, "momentum": 0.9},
    "bitsandbytes.LARS8bit": {**SMALLER, "momentum": 0.9},
    **{f"dadaptation.DAdapt{name}": {"lr": 1.0} for name in ("AdaGrad", "Adam", "Adan", "Lion")},
    "dadaptation.DAdaptSGD": {"lr": 1.0, "momentum": 0.9},
}


# -- on a rank -------------------------------------------------------------------------------------


def cell(directory: Path) -> None:
    """Answer some cases of one optimizer in one layout, on every rank by itself."""
    warnings.simplefilter("ignore")
    name, layout, life, *cases = json.loads(os.environ[CELL])
    out = directory / f"answers_{os.environ['RANK']}"
    kind = Game if name in GAMES else Averaged if name == AVERAGED else Subject
    subject = kind(name, catalogue()[name], layout, directory)
    for case in cases:
        litter()
        if answer := subject.answer(case, life):  # none to a half of one
            with out.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(answer)) + "\n")


class Subject:
    """One optimizer in one layout."""

    def __init__(self, name: str, make: Make, layout: str, directory: Path) -> None:
        self.name, self.make, self.layout, self.directory = name, make, layout, directory
        self.done = 0  # the last step of the Trainer of today, of those that were not skipped
        self.began = -1  # the step after which it began
        self.later = False  # the Trainer makes the optimizer, as a refusal has asked for
        self.whole: dict[str, Tensor] | None = None

    def answer(self, case: str, life: int) -> Answer | None:
        answered = functools.partial(Answer, self.name, self.layout, case)
        try:
            by_hand(self.make)
        except BaseException as error:  # noqa: BLE001 (code of libraries)
            return answered("none", said=sentence(error))
        try:
            found = self._tried(case, life)
        except OrchestratorError as error:
            if BY_FUNCTION in error.fix and not self.later:
                self.later = True
                return self.answer(case, life)
            kind = "late" if self.done else "refused"
            return answered(kind, said=f"{error.what}; {error.fix}")
        except BaseException as error:  # noqa: BLE001
            return answered("BARE", said=sentence(error))
        coarse = torch.get_default_dtype() is torch.float32
        if (
            coarse
            and found is not None
            and found[0] == "WRONG"
            and case not in ("restart", "resume")
        ):
            torch.set_default_dtype(torch.float64)  # where what is chaotic stays close
            try:
                return self.answer(case, life)
            finally:
                torch.set_default_dtype(torch.float32)
        return found and answered(*found)

    def _tried(self, case: str, life: int) -> tuple[str, float] | None:
        if case == "restart":
            return self._restarted(life)
        if case == "resume":
            place = {"save_to": self.directory / "saved", "save_every": "4 steps"}
            self._train(self.make, max_period="4 steps", **place)
            return self._same(self._train(self.make, resume=True, **place))
        after, poisoned = (thaw if case == "unfreeze" else None), FIRST if case == "skip" else NONE
        make = clipping(self.make) if case == "hook" else self.make
        alike = trained_at_first(make) if self.later else make
        reference = functools.partial(by_hand, alike, after, poisoned)
        found = self._train(make, after, poisoned)
        if case == "train":
            self.whole = found
        return compared(found, reference)

    def _restarted(self, life: int) -> tuple[str, float] | None:
        """Keep half a training in memory in one life of the ranks; go on from it in the next."""
        keys = {"checkpoint": {"memory_every": 1}}
        if life == 0:
            self._train(self.make, max_period="4 steps", keys=keys)
            return None
        found = self._train(self.make, keys=keys)
        if self.began != STEPS // 2:
            return "WRONG", float("inf")
        return self._same(found)

    def _same(self, found: dict[str, Tensor]) -> tuple[str, float]:
        if self.whole is None:
            self.whole = self._train(self.make)
        distance = relative(found, self.whole)
        if distance:  # a save shows what evaluation would see, and going back from that rounds
            saves = {"save_to": self.directory / "whole", "save_every": "4 steps"}
            distance = relative(found, self._train(self.make, **saves))
        if not distance:
            return "to the bit", distance
        lost = relative(resumed_by_hand(self.make), by_hand(self.make))
        return ("as torch" if lost else "WRONG"), distance

    def _in_layout(self, keys: dict[str, Any] | None) -> dict[str, Any]:
        """Return a Trainer's arguments for the layout, which also note the step it begins at."""
        layout = dict(LAYOUTS[self.layout][1])
        layout["config"] = {**layout.get("config", {}), **(keys or {})}
        self.began = -1

        def begins(trainer: Trainer) -> None:
            self.began = trainer.state.step

        return {**layout, "on_train_begin": begins}

    def _made(self, make: Make, **more: Any) -> Trainer:
        return made(make, **more)

    def _train(
        self,
        make: Make,
        after: Any = None,
        poisoned: slice = NONE,
        keys: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Tensor]:
        self.done = 0

        def step_done(trainer: Trainer) -> None:
            self.done = trainer.state.step - int(trainer.parts.steppers.first.skipped)
            if after is not None:
                after(trainer.bare, trainer.state.step)

        trainer = self._made(
            make, frozen=after is thaw, later=self.later, accumulate=2, on_step_end=step_done,
            **self._in_layout(keys),
        )  # fmt: skip
        return trained(trainer, poisoned, **more)


def trained_at_first(make: Make) -> Make:
    """Leave out what is frozen, as a Trainer that makes the optimizer does."""
    return lambda parameters: make([p for p in parameters if p.requires_grad])


class Game(Subject):
    """A GAN in one layout."""

    def _tried(self, case: str, life: int) -> tuple[str, float] | None:
        if case in ("restart", "resume"):
            return super()._tried(case, life)
        if case in ("hook", "unfreeze"):
            return "none", 0.0
        bad = case == "skip"
        found = self._train(self.make, poisoned=FIRST if bad else NONE)
        every = GAMES[self.name].get("every", {}).get("G", 1)
        call = several.poisoned if bad else several.step
        return compared(found, lambda **_: several.by_hand(call, marked=bad, every=every))

    def _train(
        self,
        make: Make,
        after: Any = None,
        poisoned: slice = NONE,
        keys: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Tensor]:
        bad = poisoned is FIRST
        trainer = several.made(
            several.poisoned if bad else several.step, accumulate=2,
            **GAMES[self.name], **self._in_layout(keys),
        )  # fmt: skip
        return several.trained(trainer, marked=bad, **more)


class Averaged(Subject):
    """An optimizer with an average of the weights, which is what is compared."""

    def _tried(self, case: str, life: int) -> tuple[str, float] | None:
        if case in ("restart", "resume"):
            return super()._tried(case, life)
        if case != "train":
            return "none", 0.0
        self.whole = self._train(self.make)
        mean: dict[str, Tensor] = {}

        def average(model: Any, step: int) -> None:
            for name, weight in model.named_parameters():
                mean.setdefault(name, weight.detach().clone()).lerp_(weight.detach(), 1 - DECAY)

        by_hand(self.make, average)
        return compared(self.whole, lambda **_: mean)

    def _made(self, make: Make, **more: Any) -> Trainer:
        self.trainer = made(make, ema=DECAY, **more)
        return self.trainer

    def _train(self, make: Make, *given: Any, **more: Any) -> dict[str, Tensor]:
        super()._train(make, *given, **more)
        average = self.trainer.parts.steppers.first.average
        assert average is not None
        weights: dict[str, Any] = average.weights
        return {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in weights.items()}


def compared(
    found: dict[str, Tensor], reference: Callable[..., dict[str, Tensor]]
) -> tuple[str, float]:
    expected = reference()
    distance = relative(found, expected)
    if not distance:
        return "to the bit", distance
    if relative(reference(seed=1), expected):
        return "as torch", distance
    apart = max(relative(reference(turned=turns), expected) for turns in (1, 3, 6))
    most = max(LEAST[torch.get_default_dtype()], 10 * apart)
    return ("parity" if distance <= most else "WRONG"), distance


def relative(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Give the largest difference, as a part of the largest weight of its tensor."""
    worst = 0.0
    for name, expected in other.items():
        both_lost = ~expected.isfinite() & ~one[name].isfinite()
        apart = (one[name] - expected).abs().masked_fill(both_lost, 0.0).max()
        size = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-3)
        worst = max(worst, float((apart / size).nan_to_num(float("inf"))))
    return worst


def sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()[:300]


# -- here ------------------------------------------------------------------------------------------


def ask(name: str, layout: str, cases: list[str], limit: float) -> list[Answer]:
    """Have ranks answer all cases; a case that ends them is told from those after it."""
    sys.modules["scripts.zoo"] = sys.modules["__main__"]  # for the ranks, which are forked
    with tempfile.TemporaryDirectory(prefix="zoo_") as place:
        return asked(name, layout, cases, Path(place), limit)


def asked(name: str, layout: str, left: list[str], place: Path, limit: float) -> list[Answer]:
    ranks, answers = LAYOUTS[layout][0], list[Answer]()
    while left:
        for life in (0, 1):
            answered = {answer.case for answer in answers}
            cases = left if life == 0 else sorted({"restart"} & {*left} - answered)
            if not cases:
                continue
            where = place / f"{len(left)} {life}"
            job = worlds.Job(
                str(where), [ranks], {}, env={CELL: json.dumps([name, layout, life, *cases])},
                memory=str(place / "memory"), timeout=limit, call="scripts.zoo:cell",
            )  # fmt: skip
            worlds.finish(job, worlds.start(job))
            answers += merged(where, ranks)
        answered = {answer.case for answer in answers}
        unanswered = [case for case in left if case not in answered]
        if unanswered:
            last = (where / "out_0").read_text()[-200:] if where.exists() else ""
            answers.append(Answer(name, layout, unanswered[0], "BARE", said=f"no end: {last}"))
        left = unanswered[1:]
    return answers


def merged(where: Path, ranks: int) -> Iterator[Answer]:
    """Give the worst answer of all ranks to each case that all of them have answered."""
    of_ranks = []
    for rank in range(ranks):
        path = where / f"answers_{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        of_ranks.append({line["case"]: Answer(**line) for line in map(json.loads, lines)})
    for case in CASES:
        answers = [found[case] for found in of_ranks if case in found]
        bad = any(answer.kind in ("BARE", "WRONG") for answer in answers)
        if len(answers) == ranks or bad:
            yield min(answers, key=lambda answer: WORST.index(answer.kind))


def summary(answers: list[Answer]) -> str:
    kinds = list(reversed(WORST))
    lines = ["| layout | case | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 2) + "|"]
    for layout in LAYOUTS:
        for case in CASES:
            counts = Counter(a.kind for a in answers if (a.layout, a.case) == (layout, case))
            if counts:
                row = " | ".join(str(counts[kind]) for kind in kinds)
                lines.append(f"| {layout} | {case} | {row} |")
    for answer in answers:
        if answer.kind in ("WRONG", "BARE"):
            lines.append(" ".join(str(value) for value in dataclasses.astuple(answer)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Try optimizers in every layout of the ranks.")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--double", action="store_true", help="in float64, where noise vanishes")
    parser.add_argument("--results", type=Path, default=Path("zoo.jsonl"))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each optimizer")
    parser.add_argument("--at-once", type=int, default=1, help="optimizers at a time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.double:
        torch.set_default_dtype(torch.float64)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    answers = [Answer(**json.loads(line)) for line in lines]
    known = {(answer.optimizer, answer.layout) for answer in answers}
    names = [name for name in catalogue() if re.search(options.only, name)]
    cells = [(n, layout) for layout in options.layouts.split(",") for n in names]
    with ProcessPoolExecutor(options.at_once, multiprocessing.get_context("fork")) as pool:
        cases = [case for case in CASES if case in options.cases.split(",")]
        work = [
            pool.submit(ask, *cell, cases, options.limit) for cell in cells if cell not in known
        ]
        for done in as_completed(work):
            answers += (new := done.result())
            with options.results.open("a") as file:
                file.writelines(json.dumps(dataclasses.asdict(a)) + "\n" for a in new)
    print(summary(answers))


if __name__ == "__main__":
    main()
