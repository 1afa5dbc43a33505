"""Recipe for fine-tuning a pretrained language model on examples."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dray import spec
from dray.spec.program import base_files
from ray_workers.datasets.core.errors import shortened
from ray_workers.datasets.formats.base_models import BaseModel, open_base
from ray_workers.datasets.formats.examples import Encoder, Examples
from ray_workers.recipes import (
    example_sets,
    measures,
    pair_encoding,
    preferences,
    results,
    sample_prompts,
    tuned_files,
)
from ray_workers.recipes.chat_encoding import ExampleEncoder
from ray_workers.recipes.example_sets import ExampleSets
from ray_workers.recipes.export import need
from ray_workers.recipes.models import compat_transformers, pretrained
from ray_workers.recipes.models.paired import PreferenceModel, RewardModel
from ray_workers.recipes.own_metrics import OwnMetrics
from ray_workers.recipes.pair_encoding import PairEncoder
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError, ModelError
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import Rows, Samples

PACKAGES = ("transformers", "accelerate", "jinja2")
_NOT_OF_TOKENS = {
    "sft": {"packing", "metrics"},
    "dpo": {"loss", "beta", "label_smoothing"},
    "reward": set[str](),
}
"""Options of each method that don't change the tokens of examples."""


def build(document: spec.JobSpec, policy: DataPolicy, own: spec.Data | None = None) -> Workload:
    """Build a workload from examples. The loss of a sample is the sum of the losses of its counted
    tokens. Raises DataError and ModelError."""
    assert own is None  # only federated jobs have other data
    options, method = _options_of(document)
    _require(*PACKAGES, *(["peft"] if options.adapter else []))
    if options.adapter is not None and options.adapter.base_precision == "nf4":
        _require("bitsandbytes", setting="model.adapter.base_precision nf4", extra="nf4")
    base = open_base(options, policy, method.max_length)
    with _small_files(base) as folder:
        parts = pretrained.parts_of(
            *(base, folder, options.adapter),
            packs=isinstance(method, spec.Sft) and method.packing,
            scores=isinstance(method, spec.Reward),
        )
        tokenizer = _tokenizer(folder, base, options)
        model = _model(parts, folder, options, method, tokenizer)
        prompts = sample_prompts.prompts_of(document.samples, tokenizer, folder, method.max_length)
    sets = _sets(document, policy, base, tokenizer, model.vocabulary_size)
    examples = sets.examples
    report = example_sets.report(sets, tokenizer)
    return Workload(
        model=model,
        train=_samples(examples, sets.training, method, model),
        validation=_samples(examples, sets.validation, method, model),
        **_objective(method, options, model.vocabulary_size),
        fingerprint=examples.fingerprint,
        write_results=tuned_files.writer(document, base, model, examples.fingerprint),
        about=[*example_sets.lines(report)],
        files={"examples.json": report},
        base=base.sha256 if model.has_frozen_weights else None,
        gathers_result=options.adapter is not None,
        result_dtypes=model.result_dtypes,
        prompts=prompts,
    )


def preview(document: spec.JobSpec, policy: DataPolicy) -> tuple[dict[str, Any], list[str]]:
    """Return the content of the job's `examples.json`, and its lines in the job's log. The base's
    weights are not read. Raises DataError, ModelError and SourceUnavailableError."""
    options, method = _options_of(document)
    _require(*PACKAGES)
    base = open_base(options, policy, method.max_length, needs_weights=False)
    with _small_files(base) as folder:
        tokenizer = _tokenizer(folder, base, options)
    size = base.config.get("vocab_size")
    sets = _sets(document, policy, base, tokenizer, size if isinstance(size, int) else None)
    report = example_sets.report(sets, tokenizer)
    return report, [*example_sets.lines(report)]


def _options_of(document: spec.JobSpec) -> tuple[spec.Pretrained, spec.AnyMethod]:
    assert isinstance(document.model, spec.Pretrained)
    assert document.method is not None
    return document.model, document.method


def _require(*packages: str, setting: str = "fine_tuning", extra: str = "tuning") -> None:
    """Raise ModelError if a package is missing."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a base is never looked up on a hub
    try:
        need(setting, extra, *packages)
    except ImportError as error:
        raise ModelError(str(error)) from error


def _tokenizer(folder: Path, base: BaseModel, options: spec.Pretrained) -> Any:
    tokenizer = compat_transformers.load_tokenizer(folder, base.location)
    if options.chat_template is not None:
        tokenizer.chat_template = options.chat_template
    return tokenizer


def _sets(
    document: spec.JobSpec,
    policy: DataPolicy,
    base: BaseModel,
    tokenizer: Any,
    vocabulary_size: int | None,
) -> ExampleSets:
    """Open the examples. Raises DataError if they have a token that the model does not have.
    vocabulary_size: None if it is unknown."""
    options, method = _options_of(document)
    sets = example_sets.open_sets(
        document.data,
        policy,
        method,
        lambda one: _encoder(tokenizer, method, one),
        {**_encoding(base, method), "chat_template": options.chat_template},
        document.train.seed,
    )
    largest = int(sets.examples.ids.max())
    if vocabulary_size is not None and largest >= vocabulary_size:
        token = shortened(tokenizer.convert_ids_to_tokens(largest))
        raise DataError(
            f"the tokenizer of {base.location} has the token {token} with the id {largest:,}, but "
            f"the model has only {vocabulary_size:,} tokens: resize the model's embedding"
        )
    return sets


def _model(
    parts: pretrained.Parts,
    folder: Path,
    options: spec.Pretrained,
    method: spec.AnyMethod,
    tokenizer: Any,
) -> pretrained.PretrainedModel:
    """Create the model of a method on the meta device. folder: contains `config.json`."""
    match method:
        case spec.Sft():
            return pretrained.PretrainedModel(*parts)
        case spec.Dpo():
            is_own = options.adapter is None
            copy = compat_transformers.empty_model(parts.base, folder) if is_own else None
            return PreferenceModel(parts, copy)
        case spec.Reward():
            return RewardModel(parts, tokenizer)


def _encoder(tokenizer: Any, method: spec.AnyMethod, data: spec.Data) -> Encoder:
    if isinstance(method, spec.Sft):
        return ExampleEncoder(tokenizer, method, data.examples)
    return PairEncoder(tokenizer, method)


def _objective(
    method: spec.AnyMethod, options: spec.Pretrained, vocabulary_size: int
) -> dict[str, Any]:
    """Return the fields of the workload with the loss and the metrics."""
    if isinstance(method, spec.Sft):
        return {
            "inputs_per_token": 2,  # its id and its position
            "loss_sum": measures.token_losses,
            "validation_loss_sum": measures.token_losses,
            "metrics": OwnMetrics(method, options.code, vocabulary_size),
        }
    loss_sum = preferences.loss_sum(method)
    return {
        "inputs_per_token": 3,  # its id, its position and its target
        "loss_sum": loss_sum,
        "validation_loss_sum": loss_sum,
        "metrics": partial(preferences.metrics, method),
        "step_metrics": preferences.measures(method),
    }


@contextmanager
def _small_files(base: BaseModel) -> Iterator[Path]:
    """Create a folder with the base's files, except for the weights and the files in subfolders.
    transformers needs this folder, because it expects each file under its name."""
    with tempfile.TemporaryDirectory(prefix="dray-base-") as folder:
        for name, path in base.paths.items():
            if "/" not in name and not name.endswith(".safetensors"):
                Path(folder, name).symlink_to(path)
        yield Path(folder)


def _encoding(base: BaseModel, method: spec.AnyMethod) -> dict[str, Any]:
    """Return everything that determines the tokens of the examples, except for the data."""
    import transformers

    digest = hashlib.sha256()
    for name, path in sorted(base.paths.items()):
        if "/" not in name and (name == base_files.CONFIG or tuned_files.is_of_tokenizer(name)):
            digest.update(
                json.dumps([name, hashlib.sha256(path.read_bytes()).hexdigest()]).encode()
            )
    return {
        "tokenizer": digest.hexdigest(),
        "transformers": transformers.__version__,
        **method.model_dump(mode="json", exclude=_NOT_OF_TOKENS[method.name]),
    }


def _samples(
    examples: Examples, rows: Rows, method: spec.AnyMethod, model: pretrained.PretrainedModel
) -> Samples:
    if not isinstance(method, spec.Sft):
        return pair_encoding.samples(examples, rows)
    if not method.packing:
        longest = 0
    elif model.attends_apart:  # the length of a row does not matter
        longest = int(examples.lengths.sum())
    else:
        longest = method.max_length

    def fetch(at: Rows) -> tuple[Tensor, Tensor]:
        return _joined(examples, at, longest)

    num_terms = examples.num_counted[rows]
    return Samples(rows, fetch, num_terms=num_terms, is_ragged=True)


def _joined(examples: Examples, at: Rows, longest: int) -> tuple[Tensor, Tensor]:
    """Return the inputs, int64 (rows, 2, T) token ids and positions, and the targets, int64 (rows,
    T), of some examples. T is the length of the longest row.

    longest: maximum length of a row with several examples. Padding continues the positions of the
    last example in its row, whose tokens don't attend to the padding.
    """
    lengths = examples.lengths[at]
    groups = best_fit(lengths, longest)
    width = max(int(lengths[group].sum()) for group in groups)
    inputs = torch.zeros(len(groups), 2, width, dtype=torch.int64)
    targets = torch.full((len(groups), width), measures.IGNORED)
    for row, group in enumerate(groups):
        start = 0
        for number in group:
            tokens = examples.tokens(int(at[number]))
            ids = torch.from_numpy(examples.ids[tokens].astype(np.int64))
            counts = torch.from_numpy(examples.counts[tokens].copy())
            end = start + len(ids)
            inputs[row, 0, start:end] = ids
            inputs[row, 1, start:] = torch.arange(width - start)
            targets[row, start : end - 1] = ids[1:].where(counts[1:], measures.IGNORED)
            start = end
    return inputs, targets


def best_fit(lengths: Sequence[int] | Rows, longest: int) -> list[list[int]]:
    """Pack examples into rows of at most `longest` tokens, each as full as possible: the longest
    example that is left goes to the fullest row with enough space. Returns the indices of each row
    in ascending order, and the rows in the order of their first examples."""
    rows: list[list[int]] = []
    left: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-int(lengths[n]), n)):
        length = int(lengths[number])
        fitting = [row for row, space in enumerate(left) if space >= length]
        if fitting:
            row = min(fitting, key=lambda one: (left[one], one))
        else:
            row = len(rows)
            rows.append([])
            left.append(longest)
        rows[row].append(number)
        left[row] -= length
    return sorted(sorted(row) for row in rows)


@dataclass(frozen=True)
class Writer:
    """A fine-tuned model and its tokenizer."""

    model: nn.Module
    tokenizer: Any

    def predict(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        num_tokens: int = 100,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Return the model's answer to a conversation (a list of messages), or its continuation of
        a text. Each token is the most likely token if the temperature is 0, and is sampled at any
        other temperature. The answer ends with the model's end token, or after `num_tokens`. Raises
        ValueError for an empty prompt."""
        if not prompt:
            raise ValueError("the prompt is empty")
        if isinstance(prompt, str):
            encoded = self.tokenizer(prompt, return_tensors="pt")
            if encoded["input_ids"][0, -1] == self.tokenizer.eos_token_id:  # added by the tokenizer
                encoded["input_ids"] = encoded["input_ids"][:, :-1]
        else:
            encoded = self.tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        ids = encoded["input_ids"].to(next(self.model.parameters()).device)
        draws = {"temperature": temperature} if temperature > 0.0 else {}
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(seed)
            generate: Any = self.model.generate
            found = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=temperature > 0.0,
                pad_token_id=self.tokenizer.eos_token_id,
                **draws,
            )
        text: str = self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        return text


@dataclass(frozen=True)
class Judge:
    """A reward model and its tokenizer."""

    model: nn.Module
    tokenizer: Any

    def predict(
        self, answered: Sequence[Mapping[str, Any]] | str, completion: str | None = None
    ) -> float:
        """Return the reward of a conversation that ends with an answer (a list of messages), of a
        prompt with its completion, or of a text. Raises DataError if a conversation is not
        valid."""
        example: dict[str, Any]
        if not isinstance(answered, str):
            example = {"messages": list(answered)}
        elif completion is None:
            example = {"text": answered}
        else:
            example = {"prompt": answered, "completion": completion}
        ids, _ = ExampleEncoder(self.tokenizer, spec.Sft(loss="all")).encode("the input", example)
        device = next(self.model.parameters()).device
        with torch.no_grad():
            return float(self.model(torch.tensor([ids], device=device)).logits)


def load(folder: Path) -> Writer | Judge:
    """Load the merged model from the folder of a job's artifacts. Raises ImportError if a package
    is missing, and FileNotFoundError if the result has only an adapter."""
    need("dray.load of a model of fine_tuning", "tuning", *PACKAGES)
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    about = results.read_config(folder)
    if not (folder / "config.json").is_file():
        base = about["model"]["base"]
        raise FileNotFoundError(
            f"{folder} contains only an adapter (model.adapter.merge was false): load the base, "
            f"{base}, with transformers, and {folder}/adapter with peft"
        )
    tokenizer = compat_transformers.load_tokenizer(folder, str(folder))
    if about["spec"]["method"]["name"] == "reward":
        judge = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
        return Judge(nn.Module.eval(judge), tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return Writer(nn.Module.eval(model), tokenizer)
