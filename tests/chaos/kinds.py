"""The jobs that run while faults are injected, and their expected results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dray.views import JobState
from tests.chaos.ground import SILO_NAMES
from tests.chaos.plan import GOSSIP, OUTSIDE, SERVERS, SILOS, TUNED
from tests.chaos.site import sitecustomize
from tests.integration import silos
from tests.integration.harness import digits, script
from tests.unit.api.federated_rounds import tables
from tests.unit.recipes import tiny_models

ALL, SOME = "takes all", "takes some"
"""Kinds of jobs that arrive while others hold the slots. One needs all slots, the other as many as
an elastic group can release."""
TICKS = """\
import time
from dray import train
for step in range(1, NUM_STEPS + 1):
    time.sleep(0.05)
    train.report(step, {"train/loss": 1.0 / step}, total_steps=NUM_STEPS)
"""
SHORT = TICKS.replace("NUM_STEPS", "100")
LONG = TICKS.replace("NUM_STEPS", "600")
TASKS = {"size": 12, "max_running": 2}
TASK_STEPS = 20
RAISES = SHORT + 'raise RuntimeError("on purpose")\n'


TWO_OPTIMIZERS = """\
import time
import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from dray import train

train.init(seed=1, checkpoint_every_steps=100)
torch.manual_seed(1)
generator = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizers = [torch.optim.AdamW(part.parameters(), lr=0.003) for part in (generator, critic)]
data = torch.utils.data.TensorDataset(torch.randn(400, 2) + 2)
loader = torch.utils.data.DataLoader(data, batch_size=40, shuffle=True)
_, _, loader = train.prepare([generator, critic], optimizers, loader)
for epoch in train.epochs(NUM_EPOCHS):
    for (real,) in loader:
        fake = generator(torch.randn(len(real), 4))
        optimizers[1].zero_grad()
        scores, faked = critic(real), critic(fake.detach())
        (bce(scores, scores * 0 + 1) + bce(faked, faked * 0)).backward()
        optimizers[1].step()
        time.sleep(0.015)
        optimizers[0].zero_grad()
        scores = critic(fake)
        loss = bce(scores, scores * 0 + 1)
        loss.backward()
        optimizers[0].step()
        time.sleep(0.015)
        train.report({"train/loss": loss})
if train.context().rank == 0:
    both = {**generator.state_dict(prefix="g."), **critic.state_dict(prefix="d.")}
    safetensors.torch.save_file(both, "model.safetensors")
    train.save_artifact("model.safetensors")
"""
EPOCHS_OF_TWO = 60


@dataclass(frozen=True)
class Kind:
    """A job and its expected results."""

    name: str
    spec: dict[str, Any]
    num_steps: int
    ends_as: JobState = JobState.SUCCEEDED
    is_recipe: bool = True
    keeps_weights: bool = True
    """Whether the weights, if any, must be bit-identical to the weights of a run without faults."""
    saves_model: bool = False
    """Whether it is a script that saves `model.safetensors` as recipes do."""
    reports_all: bool = True
    """Whether every step has a `train/loss`. If not, only the steps of one of several workers have
    one."""
    repeats: tuple[str, ...] = ()
    """Series, or prefixes of their names, that must be bit-identical to a run without faults."""
    tables: tuple[Path, ...] = ()
    """Data files of the clients outside of the cluster."""
    cancel: bool = False
    """Whether it is cancelled after the last fault."""
    is_trial: bool = False
    """Whether it is a trial, which may be stopped early because others are better."""

    @property
    def num_ranks(self) -> int:
        if self.silos:
            return len(self.silos) + 1
        return int(self.spec["resources"]["num_workers"])

    @property
    def federated(self) -> Mapping[str, Any]:
        """The federated section of the document. Empty for other jobs."""
        found: Mapping[str, Any] = self.spec.get("federated", {})
        return found

    @property
    def silos(self) -> Sequence[str]:
        """Names of the silos."""
        return [silo["name"] for silo in self.federated.get("silos", ())]

    @property
    def is_sweep(self) -> bool:
        return "sweep" in self.spec

    @property
    def is_array(self) -> bool:
        """Whether it is many jobs from one document, which may share a supervisor."""
        return "array" in self.spec

    def trial(self, index: int) -> Kind:
        """Return the kind of one trial of a sweep."""
        return replace(self, name=f"{self.name}, trial {index}", is_trial=True)


STEPS_PER_EPOCH = 45
"""For the digits: 1,438 training samples in batches of 32."""
GPU_EPOCHS = 8


def _digits(name: str, num_workers: int, epochs: int, every_steps: int, **more: Any) -> Kind:
    spec = digits(
        name=name,
        train={"epochs": epochs, "global_batch_size": 32},
        resources={"num_workers": num_workers},
        checkpoint={"every_steps": every_steps},
        # Retries aren't charged for faults of Ray or the kernel, but a SIGSEGV counts as a user
        # error.
        max_retries=20,
    )
    return Kind(name, spec, epochs * STEPS_PER_EPOCH, **more)


CLIENT_ROUNDS = 600
SILO_ROUNDS = 400
OUTSIDE_ROUNDS = 60
NUM_OUTSIDE = 2
OUTSIDE_DEADLINE_S = 8.0
"""Shorter than the time for which `tests.chaos.faults` stops a client."""
NUM_LARGE = 18_000
LARGE_SHAPE = (64, 64)
LARGE_STEPS = 900
"""The samples take about 290 MB as float32, more than `ray_workers.training.data.device_dataset`
keeps in memory."""


def _read_by_loaders(folder: Path) -> Kind:
    """A job of two ranks, each with a process that reads its samples from a file."""
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (NUM_LARGE, *LARGE_SHAPE), dtype=np.uint8)
    np.savez(folder / "large.npz", x=pixels, y=rng.integers(0, 10, NUM_LARGE))
    source = (folder / "large.npz").as_uri()
    kind = _digits("read by loaders", 2, epochs=2, every_steps=25)
    kind.spec["data"] = {"source": source, "loader_workers": 1, "validation_fraction": 0.02}
    kind.spec["model"] = {"name": "mlp", "width": 128}
    kind.spec["train"]["max_steps"] = LARGE_STEPS
    return replace(kind, num_steps=LARGE_STEPS)


def _clients() -> Kind:
    """A federated job with state for each client."""
    kind = _digits("clients", 2, epochs=1, every_steps=25)
    kind.spec["train"] = {"optimizer": {"name": "sgd", "lr": 0.1}}
    kind.spec["federated"] = {
        "algorithm": "scaffold",
        "clients": 40,
        "clients_per_round": 8,
        "rounds": CLIENT_ROUNDS,
        "batch_size": 16,
        "dropout_rate": 0.1,
        "evaluate_every": 50,
    }
    return replace(kind, num_steps=CLIENT_ROUNDS, repeats=("train/loss", "federated/"))


OF_ROUNDS = ("train/loss", "val/", "federated/", "silo/", "silos/")
"""Series that must be reproducible if every round waits for all clients."""


def _silos(name: str, sources: Mapping[str, str]) -> Kind:
    """A job with silos. With `SILOS[0]` each round waits for all silos, otherwise for the available
    ones."""
    waits_for_all = name == SILOS[0]
    federated = {
        "rounds": SILO_ROUNDS,
        "quorum": len(SILO_NAMES) if waits_for_all else 1,
        "evaluate_every": 10,
        "metrics": ["train/loss", "val/accuracy"],
    }
    spec = silos.job_of(sources, **federated)
    spec |= {"name": name, "checkpoint": {"every_steps": 25}, "max_retries": 20}
    repeats = OF_ROUNDS if waits_for_all else ()
    return Kind(name, spec, SILO_ROUNDS, keeps_weights=waits_for_all, repeats=repeats)


def _outside(folder: Path) -> Kind:
    """A job with clients over HTTP. Each round waits for all of them, even beyond its deadline."""
    spec = {
        "name": OUTSIDE,
        "recipe": "tabular_classification",
        "model": {"name": "mlp", "width": 8},
        "data": {"source": "sklearn://wine"},
        "train": {"optimizer": {"name": "sgd", "lr": 0.05}},
        "resources": {"num_workers": 1},
        "federated": {
            "clients": NUM_OUTSIDE,
            "clients_per_round": NUM_OUTSIDE,
            "rounds": OUTSIDE_ROUNDS,
            "quorum": NUM_OUTSIDE,
            "batch_size": 16,
            "evaluate_every": 5,
            "deadline_s": OUTSIDE_DEADLINE_S,
            "http": {},
        },
        "checkpoint": {"every_steps": 3},
        "max_retries": 20,
    }
    found = tuple(tables(folder, NUM_OUTSIDE))
    return Kind(OUTSIDE, spec, OUTSIDE_ROUNDS, repeats=OF_ROUNDS, tables=found)


def _divided(name: str, num_workers: int, every_steps: int) -> Kind:
    """A job whose model is divided among two ranks. If it has two ranks, none holds a replica, and
    lost parts come from the copies in memory."""
    kind = _digits(name, num_workers, 16, every_steps)
    kind.spec["parallel"] = {"shard": 2, "data": num_workers // 2}
    kind.spec["checkpoint"]["in_memory"] = {"every_steps": 5} if num_workers == 2 else "off"
    return kind


def _with_spare(kind: Kind) -> Kind:
    """The same job with a process that takes the place of the first rank that is lost."""
    kind.spec["elastic"] = {"spares": 1}
    return kind


def _on_gpus(kind: Kind) -> Kind:
    """The same job on pretended GPUs, which compute more slowly."""
    kind.spec["labels"] = sitecustomize.LABEL
    kind.spec["train"]["epochs"] = GPU_EPOCHS
    return replace(kind, num_steps=GPU_EPOCHS * STEPS_PER_EPOCH)


def _checked() -> Kind:
    """A job whose replicas are compared. A drill corrupts the state of one of them."""
    kind = _digits("checked", 3, 20, 25)
    kind.spec["check"] = {"replicas_every": 15}
    return kind


TUNED_EPOCHS = 60
NUM_EXAMPLES = 64


def _tuned(folder: Path, method: str) -> Kind:
    """A job that fine-tunes a tiny model. Its ranks read the base again when they are replaced, and
    generate texts if the method can."""
    base = folder / "tuned-base"
    if not base.exists():
        tiny_models.make_base(base, template=tiny_models.MARKED)
    make = tiny_models.conversations if method == "sft" else tiny_models.pairs
    for split, number in (("train", NUM_EXAMPLES), ("validation", 8)):
        (folder / method).mkdir(exist_ok=True)
        tiny_models.write_lines(folder / method / f"{split}.jsonl", make(number))
    spec = tiny_models.document(
        base,
        folder / method,
        name=method,
        model={"adapter": "lora" if method == "sft" else None},
        method={"name": method},
        data={"format": "jsonl"},
        train={"global_batch_size": 8, "epochs": TUNED_EPOCHS},
        resources={"num_workers": 2},
        parallel={"shard": 2} if method == "dpo" else {},
        checkpoint={"every_steps": 25},
        max_retries=20,
    )
    if method != "reward":
        spec["samples"] = {"prompts": ["the cat"], "max_tokens": 4}
    return Kind(method, spec, TUNED_EPOCHS * NUM_EXAMPLES // 8)


def _gossip(mode: str) -> Kind:
    kind = _digits(mode, 4, 16, 25, keeps_weights=False)
    kind.spec["sync"] = {"kind": "gossip", "mode": mode, "graph": "ring"}
    return kind


def _served(mode: str) -> Kind:
    """A job of two workers and two parameter servers. Synchronous servers replicate each other's
    shards."""
    is_synchronous = mode == "synchronous"
    kept_by = "replica" if is_synchronous else "snapshot"
    promised = {"keeps_weights": is_synchronous, "reports_all": is_synchronous}
    kind = _digits(f"{mode} servers", 4, 16, 25, **promised)
    sync = {"kind": "parameter_server", "servers": 2, "mode": mode, "shards_kept_by": kept_by}
    kind.spec["sync"] = sync
    kind.spec["train"]["optimizer"] = {"name": "sgd", "lr": 0.05}
    return kind


def _sweep() -> Kind:
    """A sweep of trials with one rank, two at a time, which leave the victim enough slots."""
    kind = _digits("sweep", 1, 6, 25)
    rates = [0.03, 3e-3, 1e-3, 1e-5]
    kind.spec["sweep"] = {
        "metric": "val/loss",
        "sampler": "grid",
        "parameters": {"train.optimizer.lr": rates},
        "max_running": 2,
        "early_stopping": {"min_steps": STEPS_PER_EPOCH, "eta": 2},
    }
    return kind


def _comes(name: str, path: Path, num_workers: int) -> Kind:
    spec = script(path, name=name, resources={"num_workers": num_workers}, max_retries=20)
    return Kind(name, spec, 100, is_recipe=False)


def kinds(folder: Path) -> dict[str, Kind]:
    """Return all kinds by name. Their scripts are written to `folder`."""
    of_two = TWO_OPTIMIZERS.replace("NUM_EPOCHS", str(EPOCHS_OF_TWO))
    task = TICKS.replace("NUM_STEPS", str(TASK_STEPS))
    programs = {
        "task": task,
        "ticks": SHORT,
        "long_ticks": LONG,
        "raises": RAISES,
        "of_two": of_two,
    }
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    sources = silos.write_sources(folder, SILO_NAMES)
    scripts = (
        Kind("script", script(folder / "ticks.py", max_retries=20), 100, is_recipe=False),
        Kind(
            "long script",
            script(folder / "long_ticks.py", max_retries=20),
            600,
            is_recipe=False,
        ),
        Kind(
            "array",
            script(folder / "task.py", array=TASKS, max_retries=20),
            TASK_STEPS,
            is_recipe=False,
        ),
        Kind("fails", script(folder / "raises.py"), 100, JobState.FAILED, is_recipe=False),
        Kind(
            "two optimizers",
            script(folder / "of_two.py", resources={"num_workers": 2}, max_retries=20),
            EPOCHS_OF_TWO * 10 * 2,  # batches per epoch, and steps per batch
            is_recipe=False,
            saves_model=True,
            reports_all=False,
        ),
    )
    found = (
        _digits("one rank", 1, 20, 25),
        _digits("two ranks", 2, 20, 25),
        _digits("four ranks", 4, 16, 25),
        _digits("elastic", 4, 16, 25, keeps_weights=False),
        _digits("often saved", 2, 20, 3),
        _divided("sharded", 2, 25),
        _divided("sharded replicas", 4, 25),
        _with_spare(_digits("with a spare", 2, 20, 25)),
        _with_spare(_divided("sharded with a spare", 2, 25)),
        _on_gpus(_digits("on GPUs", 2, GPU_EPOCHS, 25)),
        _on_gpus(_divided("sharded on GPUs", 2, 25)),
        _checked(),
        _read_by_loaders(folder),
        *(_tuned(folder, method) for method in TUNED),
        _clients(),
        *(_silos(name, sources) for name in SILOS),
        _outside(folder),
        *(_gossip(mode) for mode in GOSSIP),
        *(_served(name.removesuffix(" servers")) for name in SERVERS),
        # Long enough for stopped processes to be noticed and replaced before its end.
        _digits("long", 2, 90, 100),
        _digits("short", 2, 3, 25),
        _digits("cancelled", 2, 400, 50, ends_as=JobState.CANCELLED, cancel=True),
        _sweep(),
        _comes(ALL, folder / "ticks.py", 6),
        _comes(SOME, folder / "ticks.py", 2),
        *scripts,
    )
    by_name = {kind.name: kind for kind in found}
    by_name["elastic"].spec["elastic"] = {"min_workers": 2}
    return by_name
