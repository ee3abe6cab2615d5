from orchestrator.config.schema import SchedulerConfig
from orchestrator.engine.core.optimizer import learning_rate_factor


def rates(scheduler: SchedulerConfig, *steps: int, max_steps: int = 100) -> list[float]:
    return [round(learning_rate_factor(scheduler, step, max_steps), 6) for step in steps]


def test_schedules_share_warmup_and_differ_in_decay() -> None:
    made = {
        name: SchedulerConfig(name, warmup_steps=10) for name in ("constant", "linear", "cosine")
    }
    for scheduler in made.values():
        assert rates(scheduler, 1, 5, 10) == [0.1, 0.5, 1.0]
    assert rates(made["constant"], 11, 55, 100) == [1.0, 1.0, 1.0]
    assert rates(made["linear"], 55, 100) == [0.55, 0.1]
    assert rates(made["cosine"], 55, 100) == [0.55, 0.1]
    assert rates(made["cosine"], 30)[0] > rates(made["linear"], 30)[0]
    wsd = SchedulerConfig("wsd", warmup_steps=10, decay_steps=20, min_lr_ratio=0.0)
    assert rates(wsd, 5, 10, 80, 90, 100) == [0.5, 1.0, 1.0, 0.5, 0.0]


def test_schedule_defaults_are_filled_in() -> None:
    """A twentieth to rise, a fifth to decay; total_steps is max_steps; after it, the end's rate."""
    assert rates(SchedulerConfig("constant"), 1, 5) == [0.2, 1.0]
    assert rates(SchedulerConfig("wsd"), 80, 90, 100) == [1.0, 0.55, 0.1]
    assert rates(SchedulerConfig("linear", total_steps=50, warmup_steps=0), 25, 50, 99) == [
        0.55,
        0.1,
        0.1,
    ]
    assert rates(SchedulerConfig(), 1, max_steps=1) == [1.0]
