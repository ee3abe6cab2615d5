"""Train transformers' Llama of the same size with its Trainer, for gpu.py to compare.

It gets random tokens. torchrun starts it; rank 0 prints the tokens per second of one rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

STEPS = 30


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, size: int, length: int, vocabulary: int) -> None:
        self.size, self.length, self.vocabulary = size, length, vocabulary

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocabulary, (self.length,), generator=made)
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step is over on the GPU."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *words: Any, **more: Any) -> None:
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def main() -> None:
    model, batch = json.loads(sys.argv[1]), int(sys.argv[2])
    config = LlamaConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["model_dim"],
        intermediate_size=model["mlp_hidden_dim"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_heads"],
        num_key_value_heads=model["num_kv_heads"],
        rope_theta=model["rope_theta"],
        max_position_embeddings=model["sequence_length"],
        tie_word_embeddings=model["tie_embeddings"],
        use_cache=False,
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place,
            per_device_train_batch_size=batch,
            max_steps=STEPS,
            max_grad_norm=1.0,
            bf16=True,
            torch_compile=True,
            optim="adamw_torch_fused",
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=2,
        )
        data: Any = Tokens(
            STEPS * batch * torch.cuda.device_count(), model["sequence_length"], model["vocab_size"]
        )
        Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[clock]).train()
    steps = [
        after - before for before, after in zip(clock.times[10:], clock.times[11:], strict=False)
    ]
    print(json.dumps(batch * model["sequence_length"] / statistics.median(steps)), flush=True)


if __name__ == "__main__":
    main()
