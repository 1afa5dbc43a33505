"""Whether a job can continue from another job's complete checkpoint: rules on two documents.

The order of the samples and the optimizer's state must mean the same in both. The division of the
model, the number of workers and the length of the training may differ.
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
"""Fields of an optimizer that each step reads from the document, or that only affect how its state
is stored."""


@dataclass(frozen=True)
class Difference:
    """A difference of the documents."""

    pointer: str
    """JSON pointer (RFC 6901) of the field in the new document."""
    why: str


def difference(source: JobSpec, step: int, spec: JobSpec) -> Difference | None:
    """Return the first difference with which `spec` can't continue after `step`; None if it can."""
    for pointer, value_of, why in _RULES:
        theirs, ours = value_of(source), value_of(spec)
        if theirs != ours:
            return Difference(pointer, f"is {_shown(ours)}, and was {_shown(theirs)}: {why}")
    return _nothing_left(spec, step)


def _nothing_left(spec: JobSpec, step: int) -> Difference | None:
    most, at = spec.train.max_steps, "/train/max_steps"
    if spec.federated is not None:
        most, at = spec.federated.rounds, "/federated/rounds"
    if most is None or most > step:
        return None
    return Difference(at, f"is {most}, and {step} steps are done already")


def _shown(value: Any) -> str:
    """Return the value as a document shows it."""
    if isinstance(value, Document):
        fields = value.model_dump(mode="json", exclude_none=True).items()
        return f"{{{', '.join(f'{name}: {each}' for name, each in fields)}}}"
    return "unset" if value is None else str(value)


def _scales_its_loss(spec: JobSpec) -> str:
    return "fp16" if spec.train.precision == "fp16" else "fp32 or bf16"


def _momentum_holder(spec: JobSpec) -> str | None:
    """Return what keeps the momentum, if any: topk keeps it in place of the optimizer."""
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


_ORDER: Final = "the samples would come in another order"


def _brought_by_sklearn(spec: JobSpec) -> str:
    return spec.data.source if spec.data.scheme == "sklearn" else "of files"


_RULES: Final[tuple[tuple[str, Callable[[JobSpec], Any], str], ...]] = (
    ("/recipe", lambda spec: spec.recipe, "its model was trained for another task"),
    ("/model", lambda spec: spec.model, "its weights belong to that model"),
    ("/data/source", _brought_by_sklearn, "it was trained on other samples"),
    ("/data/validation_fraction", lambda spec: spec.data.validation_fraction, _ORDER),
    ("/train/global_batch_size", lambda spec: spec.train.samples_per_step, _ORDER),
    ("/train/seed", lambda spec: spec.train.seed, _ORDER),
    *(
        (f"/train/optimizer/{name}", _optimizers(name), "its state depends on this")
        for name in Optimizer.model_fields
        if name not in _FREE
    ),
    ("/train/precision", _scales_its_loss, "only one of them has a loss scale"),
    ("/train/ema/decay", _decay, "the stored average depends on this"),
    ("/sync/compression/name", _momentum_holder, "topk keeps the momentum in its own state"),
    ("/sync/kind", _kind, "each kind keeps a different state for its ranks"),
    ("/sync/mode", _push_weights, "copies of sgp must be multiplied by push weights"),
    ("/sync/every", _own_steps, "above 1, each rank has its own optimizer state"),
    ("/sync/outer", lambda spec: spec.outer, "its state depends on this"),
    *(
        (f"/federated/{name}", _clients(name), "its rounds would be different")
        for name in Federated.model_fields
        if name not in ("rounds", "evaluate_every", "privacy")
    ),
    *(
        (f"/federated/privacy/{name}", _privacy(name), "its rounds would be different")
        for name in Privacy.model_fields
        if name != "epsilon"
    ),
)
