"""One rank of TRL's SFTTrainer, started by torchrun. It imports nothing from dray.

python trl_rank.py base examples.jsonl lora|full target.json

Rank 0 writes the time of the end of each step, in seconds since 1970, to `target.json`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

NUM_EXAMPLES = 256
NUM_EPOCHS = 3
BATCH_SIZE = 8
"""Number of examples per rank and step."""
MAX_LENGTH = 512
LR = 1e-3
RANK, ALPHA = 8, 16


def main() -> None:
    import torch

    datasets, peft, transformers, trl = (
        importlib.import_module(name) for name in ("datasets", "peft", "transformers", "trl")
    )

    base, examples, way, target = sys.argv[1:]
    times: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *_: object, **__: object) -> None:
            times.append(time.time())

    torch.set_num_threads(1)
    lora = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with Path(examples).open() as lines:
        rows = datasets.Dataset.from_list([json.loads(line) for line in lines])
    config = trl.SFTConfig(
        output_dir=str(Path(target).parent),
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=NUM_EPOCHS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=0.0,
        max_length=MAX_LENGTH,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=config,
        train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
        peft_config=lora if way == "lora" else None,
        callbacks=[Clock()],
    )
    trainer.train()
    if int(os.environ["RANK"]) == 0:
        Path(target).write_text(json.dumps(times))


if __name__ == "__main__":
    main()
