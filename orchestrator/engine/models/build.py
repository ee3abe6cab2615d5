"""Creates the model that the config names, and its initial values.

Built-in models are created on torch's meta device, sharded, and initialised afterwards. A value
depends only on the seed, the parameter's name and the position in the parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor, nn

from orchestrator.common.errors import UsageError
from orchestrator.config.schema import Config
from orchestrator.engine.models import decoder, import_by_name, ranking
from orchestrator.engine.models.losses import Loss, as_sums
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.sharding.mesh import give_memory, local_rows


def build_model(config: Config) -> nn.Module:
    """Return a built-in model on the meta device, or the user's model from its function."""
    if config.model.kind == "target":
        return user_model(config)
    with torch.device("meta"):
        if config.model.kind == "decoder":
            return decoder.Decoder(config.model)
        return ranking.Ranking(config.model)


def user_model(config: Config) -> nn.Module:
    name = config.model.target or ""
    # With one seed, every rank creates the same model.
    torch.manual_seed(config.training.seed)
    with torch.device("cpu"):
        model = import_by_name.call_function("model", name, config.model.args)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model.target is {name!r}, which returned {import_by_name.kind_of(model)}, not a"
            " torch.nn.Module"
        )
    return model


def loss_of(config: Config) -> Loss:
    """Return a function that computes the sums of a batch, by the model or by training.loss."""
    name, model_name = config.training.loss, config.model.target
    giver = f"model.target ({model_name})" if model_name else config.model.kind
    if name is None:
        return lambda model, batch, *_: as_sums(model(batch), giver).totals()
    function, giver = (
        import_by_name.import_function("training.loss", name),
        f"training.loss ({name})",
    )
    return lambda model, batch, *_: as_sums(function(model, batch), giver).totals()


def flops_per_sample(config: Config, model: nn.Module) -> float | None:
    """Return the FLOPs of forward and backward for a sample, or None if unknown."""
    if config.model.kind == "decoder":
        if config.dataset.kind == "target":
            # The length of samples is unknown: the user's dataset decides it.
            return None
        return decoder.flops_per_sample(config.model, config.dataset.sequence_length)
    if config.model.kind == "ranking":
        return ranking.flops_per_sample(config.model)
    return stated_flops(model)


def stated_flops(model: nn.Module) -> float | None:
    """Return a user's attribute or method `flops_per_sample` of the model, or None."""
    stated = getattr(model, "flops_per_sample", None)
    stated = stated() if callable(stated) else stated
    return None if stated is None else float(stated)


def nominal_count(config: Config, world: int) -> int:
    """Return the tokens or samples in a full step of all ranks."""
    training = config.training
    samples = world * training.batch_size * training.gradient_accumulation
    return samples * (config.dataset.sequence_length if config.model.kind == "decoder" else 1)


# -- first values -----------------------------------------------------------------------------

# The count of numbers from one generator. It is small, so that a rank discards few of them.
BLOCK = 1 << 16


def is_built_in(model: nn.Module) -> TypeGuard[decoder.Decoder | ranking.Ranking]:
    return isinstance(model, (decoder.Decoder, ranking.Ranking))


def initialise_model(
    model: decoder.Decoder | ranking.Ranking, seed: int, device: torch.device
) -> None:
    """Move a model to its device and initialise every parameter, or this rank's slice of it.

    Call it before DDP wraps the model and after FSDP has sharded it.
    """
    give_memory(model, device)
    with torch.no_grad():
        for name, weight in plain_names.named_parameters(model):
            mean, std = model.initial(name, weight.shape)
            local, rows = local_rows(weight)
            if not std:
                local.fill_(mean)
                continue
            for rows_drawn, values in draw_values(seed, name, weight.shape, rows, std):
                local[rows_drawn].copy_(values)


def draw_values(
    seed: int, name: str, shape: torch.Size, rows: range, std: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the initial values of some rows in pieces, as (slice of these rows, values).

    The distribution is uniform. It has no outliers, and its bits are the same on every CPU. torch's
    normal distribution uses approximations that differ between vector units.
    """
    width = shape.numel() // shape[0]
    height = max(1, BLOCK // width)
    # A uniform distribution from -1/2 to 1/2 has a standard deviation of 1/sqrt(12).
    widest = std * 12**0.5
    for block in range(rows.start // height, -(-rows.stop // height)):
        first = block * height
        key = hashlib.blake2b(f"{seed} {name} {block}".encode(), digest_size=8).digest()
        random = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        whole = torch.empty(min(height, shape[0] - first), *shape[1:], dtype=torch.float32)
        whole.uniform_(generator=random).sub_(0.5).mul_(widest)
        start, stop = max(rows.start, first), min(rows.stop, first + len(whole))
        if start < stop:
            yield slice(start - rows.start, stop - rows.start), whole[start - first : stop - first]
