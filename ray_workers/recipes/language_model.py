"""Recipe for predicting the next byte, or the next token of a tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dray import spec
from dray.spec.program.model import CONTEXT_LENGTH
from ray_workers.datasets import Tokens, open_text
from ray_workers.datasets.core.alignment import tokens_like
from ray_workers.recipes import measures, results, splits
from ray_workers.recipes.export import export
from ray_workers.recipes.inference import outputs_of
from ray_workers.recipes.models import imported
from ray_workers.recipes.models.gpt import Gpt
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.workload import Workload, WriteResults
from ray_workers.training.data.device_dataset import Rows, Samples

TOKENIZER = "tokenizer.json"


def build(document: spec.JobSpec, policy: DataPolicy, own: spec.Data | None = None) -> Workload:
    """Build a workload from windows of `context_length` tokens. The windows at the end are used for
    validation. If `own` is given, the text comes from this data set instead of the document's data.

    The loss of a sample is the mean of the losses of its tokens. Raises DataError.
    """
    options = document.model
    assert isinstance(options, spec.Gpt | spec.Imported)
    public = tokens = open_text(document.data, policy, options.tokenizer)
    if own is not None:
        tokens = tokens_like(public, open_text(own, policy, options.tokenizer))
    length = options.context_length or CONTEXT_LENGTH
    num_windows = (
        len(tokens.ids) - 1
    ) // length  # a window's last target is the first token of the next window
    if num_windows < 2:
        raise DataError(
            f"{(own or document.data).source} has {len(tokens.ids)} tokens, too few for two "
            f"samples of model.context_length {length}"
        )
    if tokens.num_training is None:
        training, validation = splits.at_the_end(num_windows, document.data.validation_fraction)
    else:
        training, validation = splits.at_token(tokens.num_training, length, num_windows)
    return Workload(
        model=_network(options, document.train.seed, length, tokens.vocabulary_size),
        train=_samples(tokens, length, training),
        validation=_samples(tokens, length, validation),
        loss_sum=_loss_sum,
        validation_loss_sum=_loss_sum,
        metrics=measures.of_tokens,
        fingerprint=public.fingerprint,
        write_results=_writer(document, tokens),
        about=_about(tokens),
    )


def _about(tokens: Tokens) -> list[str]:
    """Return sentences for the job's log that describe a split by file names."""
    lines = []
    if tokens.num_training is not None:
        lines.append(
            f"the text is split by file name: {tokens.num_training:,} tokens for training and "
            f"{len(tokens.ids) - tokens.num_training:,} for validation; data.validation_fraction "
            "is not used"
        )
    if tokens.num_left_out:
        lines.append(f"{tokens.num_left_out:,} files for testing are ignored")
    return lines


def _network(
    options: spec.Gpt | spec.Imported, seed: int, length: int, vocabulary_size: int
) -> nn.Module:
    if isinstance(options, spec.Imported):
        outputs, form = (length, vocabulary_size), "(batch, time, vocabulary)"
        return imported.build(options, seed, (length,), outputs, form, torch.int64)
    with torch.device("meta"):
        return Gpt(options, vocabulary_size)


def _samples(tokens: Tokens, length: int, rows: Rows) -> Samples:
    window = np.arange(length + 1)

    def fetch(at: Rows) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(tokens.ids[at[:, None] * length + window].astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return Samples(rows, fetch)


def _loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / targets.shape[1]


def _writer(document: spec.JobSpec, tokens: Tokens) -> WriteResults:
    write = results.writer(document, {"vocabulary_size": tokens.vocabulary_size})

    def write_all(trained: Any, metrics: Any, step: int, folder: Path) -> None:
        write(trained, metrics, step, folder)
        if tokens.tokenizer_json is not None:
            (folder / TOKENIZER).write_bytes(tokens.tokenizer_json)

    return write_all


@dataclass(frozen=True)
class Generator:
    """A trained model and its tokenizer."""

    model: nn.Module
    context_length: int
    tokenizer: Any | None
    """A `tokenizers.Tokenizer`; None if each token is a byte."""

    def predict(
        self, prompt: str, *, num_tokens: int = 100, temperature: float = 0.0, seed: int = 0
    ) -> str:
        """Return a continuation of the prompt. Each token is the most likely token if the
        temperature is 0, and is sampled at any other temperature. Raises ValueError for an empty
        prompt."""
        ids = self._encode(prompt)
        generator = torch.Generator().manual_seed(seed)
        known = len(ids)
        for _ in range(num_tokens):
            ids.append(_choose(self._next(ids), temperature, generator))
        return self._decode(ids[known:])

    def predict_proba(self, prompt: str) -> npt.NDArray[np.float32]:
        """Return the probabilities of the token after the prompt, (vocabulary,)."""
        found: npt.NDArray[np.float32] = self._next(self._encode(prompt)).softmax(dim=0).numpy()
        return found

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write a `.onnx` or `.pt2` file that runs without dray; see `export.export`. The input of
        the exported model is `tokens`, int64 (N, context_length), and its output contains the
        logits of the next token at each position, (N, context_length, vocabulary). A shorter text
        can be padded at its end, since the padding does not affect earlier positions."""
        example = torch.zeros(2, self.context_length, dtype=torch.int64)
        about = {"context_length": self.context_length}
        return export(self.model, "tokens", example, path, about)

    def _next(self, ids: list[int]) -> Tensor:
        """Return the model's outputs for the next token. Raises ValueError if `ids` is empty."""
        if not ids:
            raise ValueError("the prompt is empty: give at least one character to continue from")
        return outputs_of(self.model, torch.tensor([ids[-self.context_length :]]))[0, -1]

    def _encode(self, text: str) -> list[int]:
        return list(text.encode()) if self.tokenizer is None else self.tokenizer.encode(text).ids

    def _decode(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return bytes(ids).decode(errors="replace")
        text: str = self.tokenizer.decode(ids)
        return text


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature <= 0.0:
        return int(logits.argmax())
    chances = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(chances, 1, generator=generator))


def load(folder: Path) -> Generator:
    """Rebuild the model from the folder of a job's artifacts."""
    config = results.read_config(folder)
    document = spec.JobSpec.model_validate(config["spec"])
    options = document.model
    assert isinstance(options, spec.Gpt | spec.Imported)
    if isinstance(options, spec.Imported):
        model = imported.at_hand(options)
    else:
        model = Gpt(options, config["vocabulary_size"])
    tokenizer = None
    if (folder / TOKENIZER).exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    length = options.context_length or CONTEXT_LENGTH
    return Generator(results.restore(model, folder), length, tokenizer)
