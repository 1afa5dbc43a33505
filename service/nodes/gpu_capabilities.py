"""The kinds of GPU that a job may be given, and their limits."""

from __future__ import annotations

from sqlalchemy.orm import Session

from dray.spec import JobSpec
from service.domain.errors import Unsatisfiable
from service.nodes import node_table

KIND = "accelerator_type:"
"""The prefix of the resource by which a Ray node tells its kind of GPU."""
WITHOUT_BF16 = frozenset({"K80", "M60", "P4", "P100", "V100", "T4"})
"""Of compute capability below 8.0, by Ray's names (`ray.util.accelerators`)."""


def kinds(session: Session, spec: JobSpec) -> set[str | None]:
    """The kind that the job names, else those that the cluster has; None for an unknown one.

    Empty where no GPU is connected.
    """
    if spec.resources.accelerator is not None:
        return {spec.resources.accelerator}
    found: set[str | None] = set()
    for node in node_table.usable(session) or ():
        if node.total.get("GPU", 0):
            own = {name.removeprefix(KIND) for name in node.total if name.startswith(KIND)}
            found |= {name for name in own if not _has_more_exact(name, own)} or {None}
    return found


def _has_more_exact(name: str, names: set[str]) -> bool:
    """Ray finds an `A100` where the operator named an `A100-80G`, and the node has both."""
    return any(other.startswith(f"{name}-") for other in names)


def refuse_missing_precision(session: Session, spec: JobSpec) -> None:
    """Unsatisfiable for a precision that some GPU lacks that the job may be given."""
    if not spec.resources.gpus_per_worker or spec.train.precision != "bf16":
        return
    found = kinds(session, spec)
    without = found & WITHOUT_BF16
    if without:
        named = " or ".join(sorted(str(kind) for kind in without))
        others = sorted(str(kind) for kind in found - without if kind)
        newer = " or ".join(others) if others else "a newer GPU"
        gathered = spec.parallel.param_dtype == "bf16"
        fields = "train.precision" + (" and parallel.param_dtype" if gathered else "")
        raise Unsatisfiable(
            f"train.precision is bf16, which a {named} can't compute in, and the job may get one",
            pointer="/train/precision",
            hint=f"set {fields} to fp16, or ask for {newer} with resources.accelerator",
        )
