"""Generates the texts of `samples` at an evaluation.

The whole text so far is computed again for each token, without a cache of keys and values, because
the model's own forward pass is the only one that gathers the weights of a divided model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from dray import train
from ray_workers.shared.frames import SamplesReport
from ray_workers.training.core.workload import TextPrompts, at_least_float32
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.elastic import process_group
from ray_workers.training.parallel import Strategy


class TextSampler:
    """Generates and reports texts. All ranks generate all texts, because ranks that share a model
    must compute together; rank 0 reports them."""

    def __init__(
        self,
        prompts: TextPrompts,
        strategy: Strategy,
        autocast: Callable[[], AbstractContextManager[object]],
        moved: Callable[[], None],
    ) -> None:
        self._prompts = prompts
        self._strategy = strategy
        self._autocast = autocast
        self._moved = moved
        self._seed = strategy.options.seed

    def sample(self, step: int, batch_size: int, world_size: int) -> None:
        """Generate the texts after a step, and report them on rank 0. A collective operation if the
        model is divided. The model must be in evaluation mode. batch_size: maximum number of texts
        to compute together."""
        prompts = self._prompts
        numbers = range(len(prompts.rows))
        texts: list[str] = []
        for start in range(0, len(prompts.rows), batch_size):
            found = self._generate(numbers[start : start + batch_size], world_size)
            texts += [prompts.text_of(row) for row in found]
        if self._strategy.rank == 0:
            report = SamplesReport(step=step, texts=texts)
            train.emit(report.KIND, report.body())

    def _generate(self, numbers: Sequence[int], world_size: int) -> list[list[int]]:
        """Return the tokens that follow the prompts with these numbers."""
        prompts, strategy = self._prompts, self._strategy
        draws = [_generator(derive_seed("samples", self._seed, number)) for number in numbers]
        rows = [list(prompts.rows[number]) for number in numbers]
        is_over = [False] * len(rows)
        for _ in range(prompts.max_tokens):
            self._moved()
            inputs = prompts.inputs_of(rows).to(strategy.device)
            with self._autocast():
                outputs = strategy.predict(inputs)
            assert outputs is not None  # it isn't divided into stages
            last = [len(row) - 1 for row in rows]
            logits = at_least_float32(outputs[range(len(rows)), last]).cpu()
            tokens = self._chosen(logits, draws)
            for at, token in enumerate(tokens):
                is_over[at] = is_over[at] or token in prompts.ends
                if not is_over[at]:
                    rows[at].append(token)
            is_done = all(is_over)
            if strategy.given.spec.is_divided:  # all ranks must stop together
                ranks = (strategy.rank, strategy.device, world_size)
                is_done = process_group.rank_0s(is_done, *ranks)
            if is_done:
                break
        return [row[len(prompts.rows[at]) :] for at, row in zip(numbers, rows, strict=True)]

    def _chosen(self, logits: Tensor, draws: Sequence[torch.Generator]) -> Iterator[int]:
        """Choose the next token of each text: (texts, vocabulary) logits -> token ids."""
        for row, draw in zip(logits, draws, strict=True):
            chances = row
            if self._prompts.temperature > 0.0:
                chances = (row.double() / self._prompts.temperature).softmax(dim=0)
                if chances.isfinite().all():  # otherwise, the model has diverged
                    yield int(torch.multinomial(chances, 1, generator=draw))
                    continue
            yield int(chances.argmax())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
