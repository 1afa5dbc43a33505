"""Which checkpoint to go on from, and the receipt that says what was restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dray.checkpoints import CheckpointRef
from ray_workers.training import checkpoints
from ray_workers.training.checkpoints import Loaded, PassedOver

MAX_TOLD = 100
MAX_WHY_CHARS = 1000


def choose(
    refs: Sequence[CheckpointRef], everywhere: Callable[[bool], bool]
) -> tuple[Loaded | None, list[PassedOver]]:
    """The first of `refs` that verifies on every rank, and those before it. A collective.

    everywhere: whether all ranks gave True; all learn the same answer.
    """
    passed_over: list[PassedOver] = []
    for verdict in checkpoints.verdicts(refs):
        sound = isinstance(verdict, Loaded)
        if everywhere(sound) and isinstance(verdict, Loaded):
            return verdict, passed_over
        if isinstance(verdict, Loaded):
            verdict = PassedOver(verdict.saved.step, "another rank found it broken")
        passed_over.append(verdict)
    return None, passed_over


def log_passed_over(passed_over: Sequence[PassedOver]) -> None:
    for step, why in passed_over:
        checkpoints.log(f"passing over the checkpoint of step {step}: {why}")


def receipt(
    loaded: Loaded | None,
    passed_over: Sequence[PassedOver],
    *,
    step: int,
    position: Mapping[str, int],
) -> dict[str, Any]:
    """Body of the RESUMED frame. The loss after the resume is not known yet: whoever stores the
    receipt takes it from the figures of the first step.

    loaded: what was restored, or begun from where `step` is 0; position: where the data go on.
    """
    body: dict[str, Any] = {"step": step, "url": "" if loaded is None else loaded.saved.url}
    if loaded is None and not passed_over:
        return body
    body["passed_over"] = [
        {"step": each.step, "why": each.why[:MAX_WHY_CHARS]} for each in passed_over[:MAX_TOLD]
    ]
    if loaded is None:
        return body
    return body | {
        "sha256": loaded.saved.manifest_sha256,
        "size_bytes": loaded.saved.size_bytes,
        "position": dict(position),
        "world_size": loaded.position.get("world_size"),
        "optimizer_restored": step > 0,
        "rng": checkpoints.RNG,
        "loss_before": loaded.loss,
    }
