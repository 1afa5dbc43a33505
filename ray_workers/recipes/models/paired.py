"""Models of pairs of answers to the same prompt: the log-probabilities of the answers, or their
rewards.

The inputs are int64 (N, 2, 3, T), indexed by the pair, by answer (0: chosen, 1: rejected), and by
kind (0: token ids, 1: positions, 2: the next token where it counts, otherwise `IGNORED`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dray.train.prepared.dtensor import local, part_of
from ray_workers.datasets.core.errors import broken
from ray_workers.recipes.measures import IGNORED
from ray_workers.recipes.models import compat_transformers
from ray_workers.recipes.models.pretrained import NEW_LAYER, Parts, PretrainedModel
from ray_workers.training.core.workload import at_least_float32
from ray_workers.training.data.sampler import derive_seed


class _PairModel(PretrainedModel):
    """Base class. Only the dropout of the adapters is used, as in TRL."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        for lm in self._lms:
            compat_transformers.train_only_adapters(lm, mode)
        return self


class PreferenceModel(_PairModel):
    """Pairs -> (N, 2, 2) log-probabilities, indexed by the pair, by model (0: trained, 1:
    reference), and by answer. Inputs of a `PretrainedModel` -> its logits.

    The reference is the base: the trained model without its adapters or, if all weights are
    trained, another frozen copy.
    """

    def __init__(self, parts: Parts, reference: nn.Module | None) -> None:
        """reference: the copy, whose values are not read yet; None if adapters are trained."""
        super().__init__(*parts)
        self.reference = None if reference is None else reference.requires_grad_(False)
        self.train()

    @property
    def _lms(self) -> list[nn.Module]:
        return [self.lm] if self.reference is None else [self.lm, self.reference]

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.ndim == 3:  # texts that the trained model continues
            return super().forward(inputs)
        rows = inputs.flatten(0, 1)
        with torch.no_grad():
            if self.reference is None:
                with compat_transformers.adapters_off(self.lm):
                    expected = _log_probabilities(self.lm, rows)
            else:
                expected = _log_probabilities(self.reference, rows)
        found = _log_probabilities(self.lm, rows)
        return torch.stack((found.view(-1, 2), expected.view(-1, 2)), dim=1)


def _log_probabilities(lm: nn.Module, rows: Tensor) -> Tensor:
    """Return the log-probability of each answer: (R, 3, T) -> (R,)."""
    ids, _, targets = rows.unbind(1)  # padding follows the tokens, which don't attend to it
    logits = lm(input_ids=ids, use_cache=False).logits
    losses = F.cross_entropy(
        at_least_float32(logits).flatten(0, 1),
        targets.flatten(),
        reduction="none",
        ignore_index=IGNORED,
    )
    return -losses.view(targets.shape).sum(dim=1)


class RewardModel(_PairModel):
    """Pairs -> (N, 2) rewards of the answers.

    As in transformers, the reward is the output of the last layer for the last token that is not
    the padding token.
    """

    def __init__(self, parts: Parts, tokenizer: Any) -> None:
        """Raises DataError if the tokenizer has no padding token."""
        super().__init__(*parts)
        self.train()
        self.lm.get_parameter(NEW_LAYER).requires_grad_(True)
        # In the order in which TRL chooses it.
        padding = tokenizer.pad_token_id, self._config.pad_token_id, tokenizer.eos_token_id
        known = [token for token in padding if token is not None]
        if not known:
            fault = "has a tokenizer with neither a padding token nor an end token"
            raise broken(parts.base.location, fault)
        self._config.pad_token_id = known[0]

    @property
    def _config(self) -> Any:
        """transformers' configuration of the text model."""
        return cast(Any, self.lm).config.get_text_config()

    @property
    def result_dtypes(self) -> Mapping[str, torch.dtype]:
        """The new layer has the type of the base's first weight, because transformers loads all
        weights in one type."""
        found = super().result_dtypes
        return {NEW_LAYER: next(iter(found.values())), **found}

    @property
    def result_config(self) -> dict[str, Any]:
        given = self._base.config
        text = {"pad_token_id": self._config.pad_token_id}
        whole: dict[str, Any] = {
            **given,
            "architectures": [type(self.lm).__name__],
            "num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
        if isinstance(given.get("text_config"), Mapping):
            return {**whole, "text_config": {**given["text_config"], **text}}
        return {**whole, **text}

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(0, 1)
        ids, positions, _ = rows.unbind(1)
        lm: Any = self.lm
        hidden = lm.base_model(input_ids=ids, use_cache=False)[0]
        rewards = at_least_float32(lm.score(hidden)).squeeze(-1)
        last = last_tokens(ids, positions, self._config.pad_token_id)
        return rewards.gather(1, last[:, None]).view(-1, 2)

    @torch.no_grad()
    def _draw_rest(self, seed: int) -> None:
        super()._draw_rest(seed)
        score = self.lm.get_parameter(NEW_LAYER)
        if NEW_LAYER in self._stored:
            return
        torch.default_generator.manual_seed(derive_seed("model", seed, NEW_LAYER))
        drawn = torch.randn(score.shape, dtype=score.dtype) * self._config.initializer_range
        local(score).copy_(local(part_of(drawn, score)))


def last_tokens(ids: Tensor, positions: Tensor, padding: int) -> Tensor:
    """Return the index of the last token of each row that is not the padding token, (R,); 0 if
    there is none. Positions after the end of a row are 0."""
    counts = (ids != padding) & (positions > 0)
    numbers = torch.arange(ids.shape[1], device=ids.device)
    return (counts * numbers).argmax(dim=1)
