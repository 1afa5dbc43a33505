"""A causal language model of transformers, whose weights are read by each rank from the files of a
base model, and adapters of peft on top of it.

transformers and peft define the modules. Everything else is dray's own code: no rank reads more of
the weights than its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dray import spec
from dray.train.prepared.dtensor import box_of, local
from ray_workers.datasets.core.errors import broken, listed
from ray_workers.datasets.formats.base_models import BaseModel
from ray_workers.recipes.models import compat_transformers
from ray_workers.recipes.models.quantised import Nf4Linear, quantise
from ray_workers.training.core.errors import ModelError
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.parallel.meta_init import draw, empty

MAGNITUDE = ".lora_magnitude_vector.default.weight"
"""End of the name of the lengths that DoRA trains."""
NEW_LAYER = compat_transformers.SCORES
"""The only parameter that a base does not need to have."""
BODY = "lm."
"""Prefix of the names of the parameters, which the names in files don't have."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file of the base model."""

    file: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool
    """Whether it is the weight of a linear layer, stored as (inputs, outputs)."""


class PretrainedModel(nn.Module):
    """(N, 2, T) token ids and positions -> (N, T, vocabulary) logits for the next token.

    A position that does not directly follow the previous position begins another sequence; tokens
    don't attend to other sequences. The state dict has only the tensors that are trained, with the
    names that transformers uses in files.
    """

    def __init__(
        self,
        lm: nn.Module,
        base: BaseModel,
        stored: Mapping[str, Stored],
        attends_apart: bool = False,
    ) -> None:
        """attends_apart: whether the attention layers need the lengths of the sequences."""
        super().__init__()
        self.lm = lm
        self.attends_apart = attends_apart
        self._base, self._stored = base, stored

    def forward(self, inputs: Tensor) -> Tensor:
        ids, positions = inputs.unbind(1)
        more: dict[str, Any] = {}
        if self.attends_apart:
            ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
            more["sequence_lengths"] = lengths_of(positions[0])
        # Without a cache, a mask and these lengths, transformers derives the block-diagonal mask of
        # joined sequences from the positions.
        found = self.lm(input_ids=ids, position_ids=positions, use_cache=False, **more)
        return cast(Tensor, found.logits).view(len(inputs), inputs.shape[2], -1)

    @property
    def vocabulary_size(self) -> int:
        """Number of rows of the embedding."""
        embedding: Any = self.lm.get_input_embeddings()  # type: ignore[operator]
        return int(embedding.weight.shape[0])

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Where the value of each parameter of the base is stored."""
        return self._stored

    @property
    def has_frozen_weights(self) -> bool:
        return not all(parameter.requires_grad for parameter in self.parameters())

    @property
    def result_dtypes(self) -> Mapping[str, torch.dtype]:
        """The types in which the weights of the base are stored."""
        return {name: one.dtype for name, one in self._stored.items()}

    @property
    def result_config(self) -> dict[str, Any] | None:
        """Content of the result's `config.json`; None if it is the base's file."""
        return None

    @property
    def block_holders(self) -> list[nn.Module]:
        """The modules with the lists of the model's layers."""
        return [cast(nn.Module, lm.base_model) for lm in self._lms]

    @property
    def _lms(self) -> list[nn.Module]:
        """The models whose values are stored."""
        return [self.lm]

    def read_values(self, device: torch.device, seed: int) -> None:
        """Read this rank's parts of the base's weights, and draw the values of the adapters."""
        ties = list(_ties(self))
        empty(self, device)
        for (module, name), others in ties:  # each module has got its own memory
            for other, key in others:
                other._parameters[key] = module._parameters[name]
        with torch.no_grad(), ExitStack() as opened:
            files: dict[str, Any] = {}

            def rows_of(found: Stored) -> Any:
                if found.file not in files:
                    path = self._base.paths[found.file]
                    files[found.file] = opened.enter_context(safe_open(path, framework="pt"))
                return files[found.file].get_slice(found.key)

            for name, parameter in (one for lm in self._lms for one in lm.named_parameters()):
                if name not in self._stored:
                    continue  # of an adapter, or of a layer that the base does not have
                found = self._stored[name]
                rows = rows_of(found)
                local(parameter).copy_(_part(rows, parameter))
                if (magnitude := self._magnitude_of(name)) is not None:
                    _fill_lengths(magnitude, rows, parameter.dtype, found.is_transposed)
            for path, layer in self.lm.named_modules():
                if isinstance(layer, Nf4Linear):
                    layer.fill(rows_of(self._stored[f"{path}.weight"])[:])
        self._draw_rest(seed)

    def _magnitude_of(self, name: str) -> Tensor | None:
        """Return the magnitude vector that DoRA trains for the weight of a layer."""
        layer, is_target, _ = name.rpartition(".base_layer.weight")
        vectors: Any = self.lm.get_submodule(layer).lora_magnitude_vector if is_target else {}
        return cast(Tensor, vectors["default"].weight) if vectors else None

    @torch.no_grad()
    def _draw_rest(self, seed: int) -> None:
        """Initialise adapters as peft does: the first matrix like a linear layer, the second one
        with zeros, so that the outputs are the same as the base's outputs."""
        for name, module in self.lm.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if name.endswith(".lora_A.default"):
                draw(module, own, derive_seed("model", seed, name))
            elif name.endswith(".lora_B.default"):
                for parameter in own.values():
                    local(parameter).zero_()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        kept, prefix = self._trained_names(), f"{kwargs.get('prefix', '')}{BODY}"
        whole: dict[str, Any] = super().state_dict(*args, **kwargs)
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in whole.items()
            if name.removeprefix(prefix) in kept
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        if wrong := state_dict.keys() ^ self._trained_names():
            raise KeyError(f"the state and the model don't have the same tensors: {listed(wrong)}")
        whole = {f"{BODY}{name}": tensor for name, tensor in state_dict.items()}
        return super().load_state_dict(whole, strict=False, assign=assign)

    def _trained_names(self) -> set[str]:
        """Return the names of the tensors that are trained. If a tensor has several names, as an
        embedding that is also the output layer does, only its first name is returned."""
        return {name for name, one in self.lm.named_parameters() if one.requires_grad}


class Parts(NamedTuple):
    """The parts of a model that is fine-tuned."""

    lm: nn.Module
    base: BaseModel
    stored: Mapping[str, Stored]
    attends_apart: bool = False


def lengths_of(positions: Tensor) -> list[int]:
    """Return the lengths of the sequences in a row: (T,) positions. Waits for the device."""
    starts = (positions.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *starts.tolist(), len(positions)]
    return [end - start for start, end in pairwise(bounds)]


def parts_of(
    base: BaseModel, folder: Path, adapter: spec.Lora | None, *, packs: bool, scores: bool = False
) -> Parts:
    """Create a model of transformers on the meta device; its buffers are on the CPU. folder:
    contains the base's `config.json`. scores: whether the last layer is a new one with a single
    output. Raises ModelError if an adapter does not fit, and DataError if the architecture is
    unknown or weights are missing."""
    lm = compat_transformers.empty_model(base, folder, scores=scores)
    compat_transformers.refuse_unfit_layers(lm, f"{base.location}/config.json", packs=packs)
    apart = packs and compat_transformers.attend_apart(lm)
    stored = stored_in(base, lm)
    if adapter is None:
        return Parts(lm.train(), base, stored, apart)
    _refuse_missing_targets(lm, adapter)
    compat_transformers.add_adapter(lm, adapter)
    if adapter.base_precision != "fp32":
        _hold_frozen(lm, torch.bfloat16)
    if adapter.base_precision == "nf4":
        quantise(lm)
    stored = {_within_adapter(name, lm): found for name, found in stored.items()}
    return Parts(lm.train(), base, stored, apart)


def _within_adapter(name: str, lm: nn.Module) -> str:
    """Return the name of a parameter after adapters were added, which wrap their targets."""
    path, _, last = name.rpartition(".")
    return f"{path}.base_layer.{last}" if hasattr(lm.get_submodule(path), "base_layer") else name


def _refuse_missing_targets(lm: nn.Module, adapter: spec.Lora) -> None:
    if adapter.target_modules == "all-linear":
        return
    names = {name: module for name, module in lm.named_modules() if name}
    linear = {
        name
        for name, module in names.items()
        if isinstance(module, nn.Linear) or compat_transformers.is_transposed(module)
    }
    shared = {module for first, others in _ties(lm) for module, _ in (first, *others)}
    known = sorted({name.rpartition(".")[2] for name in linear})
    for target in adapter.target_modules:
        if target == NEW_LAYER.rpartition(".")[0]:
            raise ModelError(
                f"model.adapter.target_modules: {target!r} is the new output layer, which is "
                "trained without an adapter: leave it out"
            )
        found = [name for name in names if name == target or name.endswith(f".{target}")]
        if not found:
            raise ModelError(
                f"model.adapter.target_modules: the base has no module {target!r}; its linear "
                f"layers are {listed(known)}"
            )
        if not linear.issuperset(found):
            kind = type(names[found[0]]).__name__
            raise ModelError(
                f"model.adapter.target_modules: {target!r} is a {kind}; only linear layers can "
                f"have an adapter: {listed(known)}"
            )
        if not shared.isdisjoint(names[name] for name in found):
            raise ModelError(
                f"model.adapter.target_modules: {target!r} shares its weight with another layer, "
                "such as the embedding, so an adapter can't be merged: leave it out"
            )


def _ties(lm: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], list[tuple[nn.Module, str]]]]:
    """Iterate over the parameters that several modules share: (module, name) of the first module,
    and of the other modules."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in lm.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    for first, *others in holders.values():
        if others:
            yield first, others


def _hold_frozen(lm: nn.Module, dtype: torch.dtype) -> None:
    """Change the type of the frozen parameters, in place. FSDP2 accepts several types in a group,
    if all trained parameters have the same type."""
    changed: dict[nn.Parameter, nn.Parameter] = {}  # a shared parameter stays shared
    for path, module in lm.named_modules():
        for name, given in module._parameters.items():
            if given is None or given.requires_grad or f"{path}.{name}" == NEW_LAYER:
                continue
            if given not in changed:
                changed[given] = nn.Parameter(given.to(dtype), requires_grad=False)
            module._parameters[name] = changed[given]


def _fill_lengths(lengths: Tensor, rows: Any, dtype: torch.dtype, is_transposed: bool) -> None:
    """Set this rank's part of the lengths of the rows of a stored weight, (outputs,). dtype: the
    type in which the weight is held."""
    start, count = 0, len(lengths)
    if isinstance(lengths, DTensor):
        (start,), (count,) = box_of(lengths)
    at = slice(start, start + count)
    if count:
        weight = (rows[:, at].T if is_transposed else rows[at]).to(dtype).to(lengths.dtype)
        local(lengths).copy_(torch.linalg.vector_norm(weight, dim=1))


def _part(rows: Any, parameter: Tensor) -> Tensor:
    """Read this rank's part of a stored tensor."""
    if not isinstance(parameter, DTensor):
        return cast(Tensor, rows[:] if parameter.ndim else rows[...])
    offsets, shape = box_of(parameter)
    if 0 in shape:
        return torch.empty(shape)
    at = tuple(slice(start, start + length) for start, length in zip(offsets, shape, strict=True))
    return cast(Tensor, rows[at])


def stored_in(base: BaseModel, lm: nn.Module) -> dict[str, Stored]:
    """Return where the value of each parameter is stored. Raises DataError if a parameter has no
    stored value, or if the stored value has another shape."""
    parameters = dict(lm.named_parameters())
    first = {parameter: name for name, parameter in parameters.items()}
    every = lm.named_parameters(remove_duplicate=False)
    name_of = {name: first[parameter] for name, parameter in every}
    buffers = {name: one for name, one in lm.named_buffers() if name not in _not_stored(lm)}
    rename = compat_transformers.renaming(lm, base.location)
    found: dict[str, Stored] = {}
    for file in base.weight_files:
        location = f"{base.location}/{file}"
        try:
            with safe_open(base.paths[file], framework="pt") as content:
                for key in content.keys():  # noqa: SIM118 (it is not a mapping)
                    alias = rename(key)
                    name = name_of.get(alias)
                    if alias in buffers:
                        _refuse_other_value(
                            f"{location}: {key}", alias, content.get_tensor(key), buffers[alias]
                        )
                    if name is not None and (name not in found or name == alias):
                        rows = content.get_slice(key)
                        dtype = compat_transformers.dtype_of(rows, f"{location}: {key}")
                        layer, _, last = name.rpartition(".")
                        found[name] = Stored(
                            file,
                            key,
                            tuple(rows.get_shape()),
                            dtype,
                            last == "weight"
                            and compat_transformers.is_transposed(lm.get_submodule(layer)),
                        )
        except (SafetensorError, OSError) as error:
            raise broken(location, f"is not a safetensors file: {error}") from error
    missing = [name for name in parameters if name not in found and name != NEW_LAYER]
    if missing:
        raise broken(
            base.location,
            f"lacks the weights {listed(missing)}, which a {type(lm).__name__} with this "
            "config.json has",
        )
    for name, parameter in parameters.items():
        if name in found and found[name].shape != tuple(parameter.shape):
            raise broken(
                f"{base.location}/{found[name].file}",
                f"has {found[name].key} with the shape {list(found[name].shape)}, but according to "
                f"config.json the shape is {list(parameter.shape)}",
            )
    return found


def _not_stored(lm: nn.Module) -> set[str]:
    """Return the names of the buffers that are not in the state dict."""
    return {
        f"{path}.{name}" if path else name
        for path, module in lm.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _refuse_other_value(location: str, name: str, given: Tensor, buffer: Tensor) -> None:
    """Raise DataError if a buffer is not stored with the value that the model has created."""
    if given.shape != buffer.shape or not torch.equal(given, buffer.to(given.dtype)):
        raise broken(
            location,
            f"is the value of the buffer {name}, which differs from the model's initial value; "
            "such architectures are not supported yet",
        )


def scaling(adapter: spec.Lora) -> float:
    """Return the factor by which the product of an adapter's matrices is multiplied."""
    return adapter.alpha / (math.sqrt(adapter.rank) if adapter.rslora else adapter.rank)


def merged(
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    factor: float,
    *,
    lengths: Tensor | None = None,
    is_transposed: bool,
) -> Tensor:
    """Return the weight plus the product of its adapter's matrices, in the weight's type. down:
    (rank, inputs), up: (outputs, rank), weight: (outputs, inputs), or (inputs, outputs) if it is
    transposed. lengths: the lengths of the rows of the sum, (outputs,), which DoRA trains."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    change = factor * (up.to(exact) @ down.to(exact))
    whole = (weight.T if is_transposed else weight).to(exact) + change
    if lengths is not None:
        whole *= (lengths.to(exact) / torch.linalg.vector_norm(whole, dim=1))[:, None]
    return (whole.T if is_transposed else whole).to(weight.dtype).contiguous()


def targets_of(names: Sequence[str]) -> list[str]:
    """Return the modules that have an adapter, given the names in a state dict."""
    end = ".lora_A.default.weight"
    return [name.removesuffix(end) for name in names if name.endswith(end)]
