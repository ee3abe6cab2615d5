"""Train a small GPT-2 with the Trainer of transformers; it continues from its newest checkpoint.

master_launch --max-restarts 3 scripts/examples/hf_trainer.py --max-steps 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max-steps", type=int, default=200)
parser.add_argument("--save-steps", type=int, default=20)
parser.add_argument("--out", type=Path, default=Path("out"))
args = parser.parse_args()

cuda = torch.cuda.is_available()
set_seed(0)
# Every row counts on from another number: the loss falls quickly.
rows = [(torch.arange(16) + start) % 32 for start in range(256)]
data = [{"input_ids": row, "labels": row} for row in rows]
model = GPT2LMHeadModel(
    GPT2Config(
        **{"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 32, "n_positions": 16},
        **{"bos_token_id": 0, "eos_token_id": 0},
    )
)
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.max_steps,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        logging_steps=4,
        save_steps=args.save_steps,
        save_total_limit=2,
        use_cpu=not cuda,
        ddp_backend="nccl" if cuda else "gloo",
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=data,
)
# The Trainer writes this file last: a directory without it was left half written.
whole = args.out.glob("checkpoint-*/trainer_state.json")
newest = max(whole, key=lambda path: int(path.parent.name.split("-")[1]), default=None)
if newest:
    print(f"resuming from {newest.parent}")
done = trainer.train(resume_from_checkpoint=str(newest.parent) if newest else None)
trainer.save_model()
if trainer.is_world_process_zero():
    print(f"{done.global_step} steps on {trainer.args.world_size} ranks")
