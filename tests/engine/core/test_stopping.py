"""How much of a training is left, by the limits that it was given."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from orchestrator.engine.core.stopping import (
    Duration,
    Limit,
    StopPolicy,
    TrainingRequest,
    TrainState,
)


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def limit(amount: float, unit: str) -> Limit:
    return Limit(Duration(amount, unit), "it is over")


@pytest.mark.parametrize(
    ("epochs", "limits", "samples", "left"),
    [
        (None, [], 100, None),
        (None, [limit(60, "seconds")], 100, None),
        (None, [limit(30, "steps")], None, 18),
        # The other ranks may still agree on it.
        (None, [limit(10, "steps")], None, 0),
        # The length of an epoch is unknown.
        (3, [], None, None),
        # Of 100 samples a step takes 16: 7 steps; in this epoch 5 are done.
        (3, [], 100, 7 + 7 - 5),
        (9, [limit(3, "epochs")], 100, 9),
        (9, [limit(3, "epochs"), limit(15, "steps")], 100, 3),
    ],
)
def test_steps_left_takes_nearest_limit(
    epochs: int | None, limits: list[Limit], samples: int | None, left: int | None
) -> None:
    state = TrainState(epoch=1, position=80, step=12)
    policy = StopPolicy(state, TrainingRequest(epochs=epochs, limits=limits))
    assert policy.steps_left(samples, 16) == left


def test_steps_left_is_same_at_end_and_start_of_epoch() -> None:
    # The last step took the remaining samples.
    state = TrainState(epoch=0, position=112, step=7)
    policy = StopPolicy(state, TrainingRequest(epochs=2))
    assert policy.steps_left(100, 16) == 7
    state.epoch, state.position = 1, 0
    assert policy.steps_left(100, 16) == 7


def test_seconds_left_counts_down() -> None:
    policy = StopPolicy(
        TrainState(), TrainingRequest(limits=[limit(600, "seconds"), limit(9, "steps")])
    )
    left = policy.seconds_left
    assert left is not None and 0 < left <= 600
    policy.began -= 1000
    assert policy.seconds_left == 0
    assert StopPolicy(TrainState(), TrainingRequest(epochs=3)).seconds_left is None
