"""Silos: ranks with their own data, an aggregator without data, and rounds that count each update
once regardless of which rank dies."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from dray.spec import JobSpec
from dray.train.kv.connection import TensorConnection
from ray_workers.recipes import RECIPES
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import LEFT_EXIT_CODE, Cause, RankTask
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.clients import silo_client
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.core.progress import FINISHED_KEY
from ray_workers.training.core.schedule import lr_at
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.elastic.store_server import loopback_store
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import SOAK
from tests.unit.training.jobs import assert_same, series, wait_for_checkpoint, weights
from tests.unit.training.ranks import (
    Gang,
    checkpoint_refs,
    frames,
    last_status,
    make_task,
    replaced,
)

SILOS = ("north", "south", "west")
ROUNDS, EPOCHS, LR = 4, 3, 0.3


def document(folder: Path, **federated: Any) -> dict[str, Any]:
    """Return a job with three silos that have their own digits; some of them lack some of the
    classes."""
    digits = load_digits()
    images = digits.images.astype(np.float32) / 16
    silos = []
    for number, name in enumerate(SILOS):
        own = np.flatnonzero(np.arange(len(images)) % 3 == number)
        own = own[digits.target[own] >= number]
        path = folder / f"{name}.npz"
        if not path.exists():
            np.savez(path, x=images[own], y=digits.target[own])
        silos.append({"name": name, "node_labels": {"silo": name}, "source": path.as_uri()})
    public = folder / "public.npz"
    if not public.exists():
        np.savez(public, x=images[::5], y=digits.target[::5])
    return {
        "recipe": "image_classification",
        "model": {"name": "mlp", "width": 16},
        "data": {"source": public.as_uri()},
        "train": {"optimizer": {"name": "sgd", "lr": LR}},
        "federated": {
            "silos": silos,
            "rounds": ROUNDS,
            "batch_size": 64,
            "local_epochs": EPOCHS,
            "metrics": ["train/loss", "val/loss", "val/accuracy"],
            **federated,
        },
    }


def run_silos(
    home: Path,
    spec: dict[str, Any],
    *,
    before: Any = None,
    recovers: bool = False,
    attempt: int = 1,
    resume_from: Any = (),
) -> list[int | None]:
    """Run the aggregator and the silos, each of which gets only its own source; return their exit
    codes."""
    sources = [silo["source"] for silo in spec["federated"]["silos"]]
    told = [{**silo, "source": None} for silo in spec["federated"]["silos"]]
    spec = {**spec, "federated": {**spec["federated"], "silos": told}}
    store = loopback_store()

    def make(*, rank: int, **options: Any) -> RankTask:
        task = make_task(
            home,
            spec,
            rank=rank,
            world_size=len(sources) + 1,
            port=store.port,
            attempt=attempt,
            resume_from=resume_from,
            **options,
        )
        return dataclasses.replace(task, silo_source=sources[rank - 1] if rank else None)

    gang = Gang(make, len(sources) + 1, before)
    try:
        gang.start()
        gang.wait(recovers=recovers)
    finally:
        gang.kill()
    return [process.exitcode for process in gang.processes]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without faults; its folder contains the data of all silos."""
    home = tmp_path_factory.mktemp("undisturbed")
    assert run_silos(home, document(home)) == [0] * 4
    return home


def test_silos_train_a_model_that_no_rank_has_the_data_of(undisturbed: Path) -> None:
    losses = series(undisturbed, "train/loss")
    assert sorted(losses) == list(range(1, ROUNDS + 1))
    assert losses[ROUNDS] < losses[1] / 1.5
    assert series(undisturbed, "silo/north/val/accuracy")[ROUNDS] > 0.4
    assert series(undisturbed, "val/accuracy")[ROUNDS] > 0.5
    assert set(series(undisturbed, "federated/updates").values()) == {3}


def test_the_weights_are_those_of_a_plain_loop(undisturbed: Path) -> None:
    """FedAvg computed from its equation, over the silos' own samples."""
    spec = document(undisturbed)
    parsed = JobSpec.model_validate(spec)
    options = parsed.federated
    assert options is not None
    assert options.silos is not None
    build = RECIPES["image_classification"].build
    works = []
    for silo in options.silos:
        own = parsed.data.model_copy(update={"source": silo.source})
        works.append(build(parsed, DataPolicy.open(), own))
    model = works[0].model
    materialise(model, torch.device("cpu"), parsed.train.seed)
    server = [p.detach().clone() for p in model.parameters()]
    for number in range(1, ROUNDS + 1):
        lr = lr_at(number, total_steps=ROUNDS, lr=LR, schedule=parsed.train.schedule)
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in server]
        total = 0
        for index, work in enumerate(works):
            for own_p, p in zip(model.parameters(), server, strict=True):
                own_p.data.copy_(p)
            size = len(work.train.rows)
            seed = derive_seed("client", parsed.train.seed, number, index)
            generator = torch.Generator().manual_seed(seed)
            for _ in range(EPOCHS):
                for at in torch.split(torch.randperm(size, generator=generator), 64):
                    inputs, targets = work.train.fetch(work.train.rows[at.numpy()])
                    model.zero_grad()
                    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                    for own_p in model.parameters():
                        assert own_p.grad is not None
                        own_p.data -= lr * own_p.grad
            total += size
            for each, own_p, p in zip(sums, model.parameters(), server, strict=True):
                each += size * (own_p.detach().double() - p.double())
        server = [(p + each / total).float() for p, each in zip(server, sums, strict=True)]
    found = weights(undisturbed)
    for (name, _), wanted in zip(model.named_parameters(), server, strict=True):
        torch.testing.assert_close(found[name], wanted, atol=1e-6, rtol=0)


def die_once_its_update_is_sent(task: RankTask) -> None:
    """Kill the silo south in round 2."""
    if task.rank != 2 or task.incarnation:
        return
    send = TensorConnection.send

    def send_and_die(self: TensorConnection, header: Any, *payload: torch.Tensor) -> None:
        send(self, header, *payload)
        if header.get("round") == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    TensorConnection.send = send_and_die  # type: ignore[method-assign]


@SOAK
def test_an_update_counts_once_if_its_silo_dies_and_comes_back(
    undisturbed: Path, tmp_path: Path
) -> None:
    spec = document(undisturbed)
    codes = run_silos(tmp_path, spec, before=die_once_its_update_is_sent, recovers=True)
    assert codes == [0] * 4
    assert replaced(tmp_path) == [2]
    updates = series(tmp_path, "federated/updates")
    assert sorted(updates) == list(range(1, ROUNDS + 1))
    # It has sent its update for round 2, and computes its update for round 3 if it returns in time.
    assert updates[2] == 3
    assert min(updates.values()) >= 2


def test_a_silo_that_comes_back_shows_that_it_begins_with_the_open_round(
    undisturbed: Path, tmp_path: Path
) -> None:
    spec = document(undisturbed, quorum=3)
    codes = run_silos(tmp_path, spec, before=die_once_its_update_is_sent, recovers=True)
    assert codes == [0] * 4
    assert last_status(tmp_path, 2, incarnation=1).resumed_step == 2, "round 3 waits for it"
    assert set(series(tmp_path, "federated/updates").values()) == {3}


def come_back_too_late(task: RankTask) -> None:
    """Make the silo south die in round 2, and its replacement arrive when the result is stored."""
    die_once_its_update_is_sent(task)
    if task.rank == 2 and task.incarnation:
        connect = silo_client.SiloClient.of

        def connect_late(*given: Any) -> Any:
            given[4].wait([FINISHED_KEY])
            return connect(*given)

        silo_client.SiloClient.of = connect_late  # type: ignore[method-assign,assignment]


@SOAK
def test_a_silo_that_comes_back_too_late_shows_the_end(undisturbed: Path, tmp_path: Path) -> None:
    spec = document(undisturbed, quorum=2)
    codes = run_silos(tmp_path, spec, before=come_back_too_late, recovers=True)
    assert codes == [0] * 4
    shown = last_status(tmp_path, 2, incarnation=1)
    assert (shown.phase, shown.resumed_step, shown.step) == (RankPhase.FINISH, ROUNDS, ROUNDS)


def die_in_round_2(task: RankTask) -> None:
    """Kill the silo south before it has sent anything."""
    if task.rank == 2:
        played = []

        def die(*_: Any) -> None:
            played.append(1)
            if len(played) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        silo_client.devices = SimpleNamespace(seed=die)  # type: ignore[assignment]


def test_rounds_go_on_without_a_silo_that_is_gone(undisturbed: Path, tmp_path: Path) -> None:
    codes = run_silos(tmp_path, document(undisturbed, quorum=2), before=die_in_round_2)
    assert codes == [0, 0, -signal.SIGKILL, 0]
    assert list(series(tmp_path, "federated/updates").values()) == [3, 2, 2, 2]


def die_after_round_2(task: RankTask) -> None:
    if task.rank == 0:

        def die() -> None:
            wait_for_checkpoint(task, 2)
            os.kill(os.getpid(), signal.SIGKILL)

        arm(FaultPoint.BACKWARD_DONE, die, at_step=3)


def test_an_aggregator_that_dies_resumes_and_no_update_counts_twice(
    undisturbed: Path, tmp_path: Path
) -> None:
    spec = document(undisturbed)
    codes = run_silos(tmp_path, spec, before=die_after_round_2)
    assert codes[0] == -signal.SIGKILL
    assert all(code for code in codes), "no silo takes the job for done"
    (error,) = frames(tmp_path, rank=1, kind="error")
    assert error["cause"] == Cause.WORKER_LOST
    refs = checkpoint_refs(tmp_path)
    assert refs[0].step == 2
    assert run_silos(tmp_path, spec, attempt=2, resume_from=refs) == [0] * 4
    assert_same(weights(tmp_path, attempt=2), weights(undisturbed))


def leave_in_round_3(task: RankTask) -> None:
    """Make silos send nothing from round 3 on, while the aggregator is asked to leave."""
    if task.rank == 0:

        def ask() -> None:
            heartbeat.ask_to_leave(task.page_prefix)

        arm(FaultPoint.STEP_BEGINS, ask, at_step=3)
        return
    play = silo_client.SiloClient.play
    played = []

    def play_twice(self: Any, given: Any) -> None:
        played.append(1)
        if len(played) > 2:
            signal.pause()
        play(self, given)

    silo_client.SiloClient.play = play_twice  # type: ignore[method-assign]
    threading.Thread(target=end_with_the_aggregator, args=(task,), daemon=True).start()


def end_with_the_aggregator(task: RankTask) -> None:
    """End the process as the supervisor would."""
    home = Path(task.spool_dir).parents[2]
    while True:
        if 2 in [one["step"] for one in frames(home, kind="checkpoint")]:
            seen = heartbeat.observe_ranks(Path(task.page_prefix).parent)
            if not any(one.rank == 0 and one.state for one in seen):
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)


def test_a_preempted_aggregator_leaves_in_the_middle_of_a_round(
    undisturbed: Path, tmp_path: Path
) -> None:
    spec = document(undisturbed)
    codes = run_silos(tmp_path, spec, before=leave_in_round_3)
    assert codes[0] == LEFT_EXIT_CODE
    refs = checkpoint_refs(tmp_path)
    assert run_silos(tmp_path, spec, attempt=2, resume_from=refs) == [0] * 4
    assert_same(weights(tmp_path, attempt=2), weights(undisturbed))


@pytest.mark.parametrize("name", ["scaffold", "krum"])
def test_methods_that_need_each_update_take_them_from_silos(
    undisturbed: Path, tmp_path: Path, name: str
) -> None:
    options = {"algorithm": name} if name == "scaffold" else {"aggregator": {"name": "median"}}
    spec = document(undisturbed, **options, rounds=2)
    assert run_silos(tmp_path, spec) == [0] * 4
    losses = series(tmp_path, "train/loss")
    assert losses[2] < losses[1]
