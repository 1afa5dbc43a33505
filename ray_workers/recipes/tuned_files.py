"""The result of fine-tuning: a folder that transformers and peft can load.

The folder contains the model's weights, its configuration and its tokenizer. If an adapter was
trained, `adapter/` contains the adapter as peft writes it, and the weights are the base's weights
with the adapter merged. Merging reads one file of the base at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dray import spec
from dray.spec.program import base_files
from ray_workers.datasets.formats.base_models import BaseModel
from ray_workers.datasets.sources.source import location_of
from ray_workers.recipes import results
from ray_workers.recipes.models import compat_transformers
from ray_workers.recipes.models.compat_transformers import SCORES
from ray_workers.recipes.models.pretrained import (
    MAGNITUDE,
    PretrainedModel,
    Stored,
    merged,
    scaling,
    targets_of,
)
from ray_workers.training.core.workload import StoredWeights, Trained, WriteResults

ADAPTER = "adapter"
_OF_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template")
_OF_MODEL = (base_files.CONFIG, "generation_config.json")


def is_of_tokenizer(name: str) -> bool:
    return name.startswith(_OF_TOKENIZER)


def writer(
    document: spec.JobSpec, base: BaseModel, model: PretrainedModel, data: str
) -> WriteResults:
    """Return a function that writes the result of training the model. data: hash of the
    examples."""
    stored, dtypes, config = model.stored, model.result_dtypes, model.result_config
    options = document.model
    assert isinstance(options, spec.Pretrained)
    adapter = options.adapter

    def write(trained: Trained, metrics: Mapping[str, float], step: int, folder: Path) -> None:
        whole = adapter is None or adapter.merge
        for name, path in base.paths.items():
            if "/" not in name and (is_of_tokenizer(name) or (whole and name in _OF_MODEL)):
                shutil.copyfile(path, folder / name)
        if options.chat_template is not None:
            (folder / "chat_template.jinja").write_text(options.chat_template)
        if whole and config is not None:
            (folder / base_files.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if adapter is None:
            results.write_weights(trained, folder, dtypes)
        else:
            state = trained.state_dict() if isinstance(trained, nn.Module) else trained
            assert isinstance(state, Mapping)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
            _write_adapter(adapter, options.base, tensors, folder / ADAPTER)
            if adapter.merge:
                new = {name: tensors[name].to(dtypes[name]) for name in tensors.keys() & {SCORES}}
                _write_merged(adapter, base, stored, tensors, new, folder)
        hashes = {"base_sha256": base.sha256, "data_sha256": data}
        results.write_about(document, hashes, metrics, step, folder, results.DRAY_CONFIG)
        (folder / "README.md").write_text(_card(document, options, base, data, metrics, step))

    return write


def _write_adapter(
    adapter: spec.Lora, base: str, tensors: Mapping[str, Tensor], folder: Path
) -> None:
    folder.mkdir()
    named = {f"base_model.model.{_in_peft(name)}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", results.METADATA)
    config = compat_transformers.lora_config(adapter, _as_path(base), scores=SCORES in tensors)
    config.inference_mode = True
    if adapter.target_modules == "all-linear":
        config.target_modules = {name.rpartition(".")[2] for name in targets_of([*tensors])}
    config.save_pretrained(folder)


def _in_peft(name: str) -> str:
    """Return the name in peft's file of a tensor of the adapter."""
    if name.endswith(MAGNITUDE):
        return name.removesuffix(".default.weight")
    return name.replace(".default.", ".")


def _as_path(url: str) -> str:
    """Return the path of a folder on this node, or the name on the hub; peft does not accept a
    URL."""
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "file" else base_files.public_name(url)


def _write_merged(
    adapter: spec.Lora,
    base: BaseModel,
    stored: Mapping[str, Stored],
    tensors: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    folder: Path,
) -> None:
    """Write the base's weights files, with the product of the adapter's matrices added to each
    weight that has an adapter. new: tensors that the base does not have, which replace its output
    layer."""
    known = {one.key for one in stored.values()}
    file_of: dict[str, str] = {}
    num_bytes = 0
    layers = {name: stored[f"{name}.base_layer.weight"] for name in targets_of([*tensors])}
    targets = {layer.key: name for name, layer in layers.items()}
    for file in base.weight_files:
        with safe_open(base.paths[file], framework="pt") as content:
            weights = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118
        for key in weights.keys() & targets.keys():
            down, up = (tensors[f"{targets[key]}.lora_{part}.default.weight"] for part in "AB")
            weights[key] = merged(
                weights[key],
                down,
                up,
                scaling(adapter),
                lengths=tensors.get(f"{targets[key]}{MAGNITUDE}"),
                is_transposed=layers[targets[key]].is_transposed,
            )
        if new:
            weights = {key: one for key, one in weights.items() if key in known}
            weights |= new if file == base.weight_files[-1] else {}
            file_of |= dict.fromkeys(weights, file)
            num_bytes += sum(one.nbytes for one in weights.values())
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / file, results.METADATA)
    if base.weight_files == [base_files.SINGLE]:
        return
    if new:
        results.write_index(StoredWeights(file_of, num_bytes), folder)
    else:
        shutil.copyfile(base.paths[base_files.INDEX], folder / base_files.INDEX)


def _card(
    document: spec.JobSpec,
    options: spec.Pretrained,
    base: BaseModel,
    data: str,
    metrics: Mapping[str, float],
    step: int,
) -> str:
    """Return the model card, in the format of Hugging Face's hub."""
    measured = "\n".join(f"| `{key}` | {value:.6g} |" for key, value in sorted(metrics.items()))
    written = json.dumps(document.without_defaults(), indent=1)
    sources = ", ".join(f"`{location_of(one.source)}`" for one in document.data.mixed)
    held_out = document.data.validation
    validation = "" if held_out is None else f"\n| validation data | `{location_of(held_out)}` |"
    kind, adapter = "all weights", options.adapter
    assert document.method is not None
    what = {
        "sft": "language model",
        "dpo": "language model, by direct preference optimization (DPO),",
        "reward": "reward model",
    }[document.method.name]
    if adapter is not None:
        kind = f"an adapter ({adapter.kind} of rank {adapter.rank})"
    return f"""---
library_name: transformers
base_model: {json.dumps(base_files.public_name(options.base))}
---

# {document.name}

A {what} that was fine-tuned by dray: {kind}, {step:,} steps.

| | |
|---|---|
| base | `{options.base}` |
| SHA-256 of the base's files | `{base.sha256}` |
| data | {sources} |{validation}
| SHA-256 of the examples | `{data}` |

| metric | value |
|---|---|
{measured}

The document of the job, without defaults:

```json
{written}
```
"""
