"""The base model, the examples and the jobs, which are the same for dray and TRL."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.fine_tuning import trl_rank as trl

NUM_RANKS: Final = 2
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
NUM_WORDS: Final = 1500
SIZES: Final = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_base(folder: Path, words: Sequence[str]) -> None:
    """Write a Llama with random weights, and a tokenizer with one token per word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers: Any = importlib.import_module("transformers")  # its types are not complete
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", *words])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_words(generator: random.Random) -> list[str]:
    return sorted({"".join(generator.choices(LETTERS, k=8)) for _ in range(NUM_WORDS)})


def write_examples(
    path: Path, words: Sequence[str], generator: random.Random, num_examples: int
) -> list[int]:
    """Write prompts and completions, and return the number of tokens of each, including its end.
    The lengths of the completions are log-normal."""
    lengths = []
    with path.open("w") as target:
        for _ in range(num_examples):
            prompt = generator.choices(words, k=generator.randint(8, 48))
            length = min(max(int(generator.lognormvariate(4.0, 0.9)), 4), 400)
            completion = generator.choices(words, k=length)
            record = {"prompt": " ".join(prompt), "completion": " " + " ".join(completion)}
            target.write(json.dumps(record) + "\n")
            lengths.append(len(prompt) + length + 1)
    return lengths


def slots_per_token(
    lengths: Sequence[int], generator: random.Random, num_epochs: int = 20
) -> float:
    """Return how many tokens, including padding, shuffled batches without packing have per token
    of the examples."""
    num_slots = 0
    for _ in range(num_epochs):
        order = generator.sample(lengths, len(lengths))
        for start in range(0, len(order), trl.BATCH_SIZE):
            batch = order[start : start + trl.BATCH_SIZE]
            num_slots += len(batch) * max(batch)
    return num_slots / (num_epochs * sum(lengths))


def document(home: Path, *, lora: bool, packing: bool) -> dict[str, Any]:
    """Return the job that `trl_rank` trains with TRL, on the base and the examples in `home`."""
    model: dict[str, Any] = {"base": (home / "base").as_uri()}
    if lora:
        model["adapter"] = {"kind": "lora", "rank": trl.RANK, "alpha": trl.ALPHA}
    return {
        "recipe": "fine_tuning",
        "model": model,
        "method": {"name": "sft", "max_length": trl.MAX_LENGTH, "packing": packing},
        "data": {
            "source": (home / "examples.jsonl").as_uri(),
            "validation": (home / "validation.jsonl").as_uri(),
        },
        "train": {
            "epochs": trl.NUM_EPOCHS,
            "global_batch_size": NUM_RANKS * trl.BATCH_SIZE,
            "optimizer": {"name": "adamw", "lr": trl.LR, "weight_decay": 0.0},
        },
        "resources": {"num_workers": NUM_RANKS},
        "max_retries": 0,
    }
