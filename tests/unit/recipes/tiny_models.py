"""Tiny base models with random weights, their tokenizers, and examples, made without a network."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

WORDS = ("the", "cat", "dog", "sees", "likes", "a", "red", "blue", "house", "tree", "and", "over")
SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def sentence(generator: random.Random, longest: int = 9) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(1, longest)))


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """Return a tokenizer of transformers with a chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    fast.chat_template = template
    return fast


@functools.cache
def _trained() -> str:
    """Train a byte-level BPE on the words, and return its JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    generator = random.Random(0)
    made.train_from_iterator([sentence(generator, 20) for _ in range(200)], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return str(made.to_str())


def make_base(
    folder: Path,
    kind: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    template: str | None = TEMPLATE,
    seed: int = 0,
    shard: str | None = None,
    **more: Any,
) -> Path:
    """Write a base model with random weights. shard: maximum size of a file of weights."""
    import transformers

    tokens = tokenizer(template)
    sizes: dict[str, Any] = {**SIZES, "vocab_size": len(tokens), **more}
    if kind == "gemma3":
        sizes = {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            **sizes,
        }
        config: Any = transformers.Gemma3TextConfig(**sizes)
    else:
        names = {
            "llama": "LlamaConfig",
            "qwen2": "Qwen2Config",
            "qwen3": "Qwen3Config",
            "gemma2": "Gemma2Config",
            "gpt2": "GPT2Config",
            "mistral": "MistralConfig",
        }
        config = getattr(transformers, names[kind])(**sizes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # so that no layer is the identity
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.2 + 0.02)
    model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    tokens.save_pretrained(folder)
    return folder


def conversations(num: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return conversations of one or two turns, some with a system message."""
    generator = random.Random(seed)
    found = []
    for _ in range(num):
        messages = []
        if generator.random() < 0.3:
            messages.append({"role": "system", "content": sentence(generator)})
        for _ in range(generator.choice((1, 1, 2))):
            messages.append({"role": "user", "content": sentence(generator)})
            messages.append({"role": "assistant", "content": sentence(generator)})
        found.append({"messages": messages})
    return found


def completions(num: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    return [
        {"prompt": sentence(generator), "completion": f" {sentence(generator)}"} for _ in range(num)
    ]


def texts(num: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    return [{"text": sentence(generator, 20)} for _ in range(num)]


def pairs(num: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return preference pairs of messages, some with several turns in their prompts."""
    found = []
    for number, one in enumerate(conversations(num, seed)):
        *prompt, answer = one["messages"]
        other = sentence(random.Random(seed + 1000 * number))
        rejected = {"role": "assistant", "content": f"{answer['content']} {other}"}
        found.append({"prompt": prompt, "chosen": [answer], "rejected": [rejected]})
    return found


def text_pairs(num: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    return [
        {
            "prompt": sentence(generator),
            "chosen": f" {sentence(generator)}",
            "rejected": f" over {sentence(generator, 14)}",
        }
        for _ in range(num)
    ]


def write_lines(path: Path, records: Sequence[Mapping[str, Any] | str]) -> Path:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def document(base: Path, examples: Path, **fields: Any) -> dict[str, Any]:
    """Return a job document. fields: fields of the document; a mapping is added to the default."""
    made: dict[str, Any] = {
        "recipe": "fine_tuning",
        "model": {"base": base.as_uri()},
        "method": {"name": "sft", "max_length": 64},
        "data": {"source": examples.as_uri(), "validation_fraction": 0.2},
        "train": {
            "global_batch_size": 6,
            "epochs": 2,
            "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.01},
            "schedule": {"name": "cosine", "warmup_steps": 2},
        },
    }
    for name, value in fields.items():
        both = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = {**made[name], **value} if both else value
    return made


def with_tiny_base(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a document with a tiny base and a few examples, which are written to `folder`, in
    place of the sources that it names."""
    base = make_base(folder / "base", max_position_embeddings=1024)
    method = given.get("method", "sft")
    name = method if isinstance(method, str) else method["name"]
    records = conversations(40) if name == "sft" else pairs(40)
    source = write_lines(folder / "examples.jsonl", records).as_uri()
    model, data = {**given["model"], "base": base.as_uri()}, {**given["data"], "source": source}
    return {**given, "model": model, "data": data}
