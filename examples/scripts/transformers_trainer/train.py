"""Train a tiny GPT-2, built from its config, with the transformers Trainer (which uses accelerate).

torchrun --nproc-per-node 2 train.py
dray submit --code . --workers 2 --requirements requirements.txt -- train.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

VOCABULARY, LENGTH = 32, 16


class Counting(Dataset):
    """Sequences that count up, each from a different token."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=os.environ.get("DRAY_OUTPUT_DIR", "."))
    options = parser.parse_args()

    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            output_dir="checkpoints",
            use_cpu=True,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=Counting(),
    )
    result = trainer.train()
    trainer.save_model(str(options.output))
    if trainer.is_world_process_zero():
        print(f"loss {result.training_loss:.9f} on {trainer.args.world_size} processes", flush=True)


if __name__ == "__main__":
    main()
