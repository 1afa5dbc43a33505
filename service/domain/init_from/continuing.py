"""Whether a job can continue from another job's complete checkpoint, judged by the two documents.

The order of the samples and the meaning of the optimizer state must be the same. The division of
the model, the number of workers and the length of the training may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dray.spec import Federated, Gossip, JobSpec
from dray.spec.federated.parts import Privacy
from dray.spec.fields import Document
from dray.spec.training.train import Optimizer

_FREE: Final = frozenset({"lr", "state_dtype", "offload"})
"""Optimizer fields that may differ, because every step reads them from the document, or because
they affect only how the state is stored."""


@dataclass(frozen=True)
class Difference:
    """A difference between the documents."""

    pointer: str
    """JSON pointer (RFC 6901) of the field in the new document."""
    why: str


def difference(source: JobSpec, step: int, spec: JobSpec) -> Difference | None:
    """Return the first difference that prevents `spec` from continuing after `step`; None if `spec`
    can continue."""
    for pointer, value_of, why in _RULES:
        theirs, ours = value_of(source), value_of(spec)
        if theirs != ours:
            return Difference(pointer, f"is {_shown(ours)}, but was {_shown(theirs)}: {why}")
    return _nothing_left(spec, step)


def _nothing_left(spec: JobSpec, step: int) -> Difference | None:
    most, at = spec.train.max_steps, "/train/max_steps"
    if spec.federated is not None:
        most, at = spec.federated.rounds, "/federated/rounds"
    if most is None or most > step:
        return None
    return Difference(at, f"is {most}, but {step} steps have already been completed")


def _shown(value: Any) -> str:
    """Return the value as written in a document."""
    if isinstance(value, Document):
        fields = value.model_dump(mode="json", exclude_none=True).items()
        return f"{{{', '.join(f'{name}: {each}' for name, each in fields)}}}"
    return "unset" if value is None else str(value)


def _scales_its_loss(spec: JobSpec) -> str:
    return "fp16" if spec.train.precision == "fp16" else "fp32 or bf16"


def _momentum_holder(spec: JobSpec) -> str | None:
    """Return whether topk or the optimizer stores the momentum; None if there is no momentum."""
    if not spec.train.optimizer.momentum:
        return None
    compression = spec.compression
    return "topk" if compression is not None and compression.name == "topk" else "not topk"


def _decay(spec: JobSpec) -> float | None:
    return None if spec.train.ema is None else spec.train.ema.decay


def _kind(spec: JobSpec) -> str:
    return "all_reduce" if spec.sync is None else spec.sync.kind


def _push_weights(spec: JobSpec) -> str:
    return "sgp" if isinstance(spec.sync, Gossip) and spec.sync.mode == "sgp" else "not sgp"


def _own_steps(spec: JobSpec) -> str:
    return "above 1" if spec.takes_local_steps else "1"


def _clients(name: str) -> Callable[[JobSpec], Any]:
    return lambda spec: None if spec.federated is None else getattr(spec.federated, name)


def _privacy(name: str) -> Callable[[JobSpec], Any]:
    privacy = _clients("privacy")
    return lambda spec: getattr(privacy(spec), name, None)


def _optimizers(name: str) -> Callable[[JobSpec], Any]:
    return lambda spec: getattr(spec.train.optimizer, name)


_ORDER: Final = "the samples would have a different order"


def _brought_by_sklearn(spec: JobSpec) -> str:
    return spec.data.source if spec.data.scheme == "sklearn" else "of files"


_RULES: Final[tuple[tuple[str, Callable[[JobSpec], Any], str], ...]] = (
    ("/recipe", lambda spec: spec.recipe, "the model was trained for a different task"),
    ("/model", lambda spec: spec.model, "the weights were trained for the earlier model"),
    ("/data/source", _brought_by_sklearn, "the model was trained on different samples"),
    ("/data/validation_fraction", lambda spec: spec.data.validation_fraction, _ORDER),
    ("/train/global_batch_size", lambda spec: spec.train.samples_per_step, _ORDER),
    ("/train/seed", lambda spec: spec.train.seed, _ORDER),
    *(
        (f"/train/optimizer/{name}", _optimizers(name), "the optimizer state depends on this field")
        for name in Optimizer.model_fields
        if name not in _FREE
    ),
    ("/train/precision", _scales_its_loss, "only fp16 uses a loss scale"),
    ("/train/ema/decay", _decay, "the stored average depends on this field"),
    ("/sync/compression/name", _momentum_holder, "topk stores the momentum in its own state"),
    ("/sync/kind", _kind, "each kind of synchronization stores a different state for the ranks"),
    ("/sync/mode", _push_weights, "only sgp multiplies the ranks' weights by push weights"),
    ("/sync/every", _own_steps, "with a value above 1, each rank has its own optimizer state"),
    ("/sync/outer", lambda spec: spec.outer, "the outer momentum depends on this field"),
    *(
        (f"/federated/{name}", _clients(name), "the rounds would be different")
        for name in Federated.model_fields
        if name not in ("rounds", "evaluate_every", "privacy")
    ),
    *(
        (f"/federated/privacy/{name}", _privacy(name), "the rounds would be different")
        for name in Privacy.model_fields
        if name != "epsilon"
    ),
)
