"""Fine-tune a small BERT, built from its config, for sentence embeddings (sentence-transformers).

torchrun --nproc-per-node 2 train.py
dray submit --code . --workers 2 --requirements requirements.txt -- train.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from transformers import BertConfig, BertModel, BertTokenizerFast, set_seed

ANIMALS, DEEDS = ["cat", "dog", "bird", "fish"], ["runs", "sleeps", "eats", "sings"]
WORDS = [*ANIMALS, *DEEDS, "a", "the", "today", "now", "here"]


def write_encoder(folder: Path) -> None:
    """Save an untrained encoder and its tokenizer to a folder that transformers can load."""
    folder.mkdir(exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(folder)
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)


def pairs() -> Dataset:
    """Pairs of sentences with the same meaning, one for each animal and activity."""
    says = [(who, what) for who in ANIMALS for what in DEEDS]
    return Dataset.from_dict(
        {
            "anchor": [f"the {who} {what} today" for who, what in says],
            "positive": [f"now here {what} a {who}" for who, what in says],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=os.environ.get("DRAY_OUTPUT_DIR", "."))
    options = parser.parse_args()

    set_seed(0)
    folder = Path(f"encoder-{os.environ.get('RANK', 0)}")
    write_encoder(folder)
    encoder = models.Transformer(str(folder), max_seq_length=16)
    pooling = models.Pooling(encoder.get_word_embedding_dimension())
    model = SentenceTransformer(modules=[encoder, pooling], device="cpu")
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir="checkpoints",
            use_cpu=True,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=pairs(),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"loss {result.training_loss:.9f} on {trainer.args.world_size} processes", flush=True)
        torch.save(model.state_dict(), Path(options.output) / "model.pt")


if __name__ == "__main__":
    main()
