"""Scripts with several models and optimizers, and state that can't be handed over."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dray import train
from dray.train import preparing
from dray.train.prepared.copies import digest
from dray.train.prepared.exchange import GradientExchange
from dray.train.prepared.trained import Trained
from tests.marks import ONE_SET, SOAK
from tests.unit.training.prepared.programs import assert_same, final_state
from tests.unit.training.ranks import (
    checkpoint_refs,
    frames,
    last_status,
    replaced,
    run_in_group,
    run_ranks,
)

GAN = """
    import os
    import torch
    from torch import nn
    from torch.nn import functional
    from dray import train

    FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def die(*point):
        if FIRST and (int(os.environ["RANK"]), *point) in {kills!r}:
            os.kill(os.getpid(), 9)

    train.init(seed=1, checkpoint_every_s=None)
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer_g = torch.optim.AdamW(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    optimizer_d = torch.optim.AdamW(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
    data = torch.utils.data.TensorDataset(torch.randn(50, 2) + 3)
    loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
    {prepare}
    bce = functional.binary_cross_entropy_with_logits
    for epoch in train.epochs(2):
        for (real,) in loader:
            at = (train.progress().epoch, train.progress().batch)
            die(*at, "begins")
            fake = generator(torch.randn(len(real), 4))
            optimizer_d.zero_grad()
            scores, faked = critic(real), critic(fake.detach())
            loss_d = bce(scores, torch.ones_like(scores)) + bce(faked, torch.zeros_like(faked))
            loss_d.backward()
            die(*at, "between pass and step")
            optimizer_d.step()
            die(*at, "between the exchanges")
            optimizer_g.zero_grad()
            scores = critic(fake)
            loss_g = bce(scores, torch.ones_like(scores))
            loss_g.backward()
            die(*at, "after the last pass")
            optimizer_g.step()
            die(*at, "ends")
            train.report({{"train/loss_d": loss_d, "train/loss_g": loss_g}})
    state = [part.state_dict() for part in (generator, critic, optimizer_g, optimizer_d)]
    torch.save(state, {out!r} + f"/state-{{os.environ['RANK']}}.pt")
"""

LISTED = "_, _, loader = train.prepare([generator, critic], [optimizer_g, optimizer_d], loader)"
AGAIN = """_, _, loader = train.prepare(generator, optimizer_g, loader)
    train.prepare(critic, optimizer_d)"""
TRACKED = """both = nn.ModuleList([generator, critic])
    _, _, loader = train.prepare(both, optimizer_g, loader, optimizer_d=optimizer_d)"""


def gan(home: Path, *kills: tuple[Any, ...], prepare: str = LISTED) -> dict[str, Any]:
    """Return the document of the program, in which these ranks die at (epoch, batch, point)."""
    home.mkdir(exist_ok=True)
    path = home / "gan.py"
    text = textwrap.dedent(GAN)
    path.write_text(
        text.format(kills=set(kills), out=str(home), prepare=prepare.replace("    ", ""))
    )
    return {"script": {"entrypoint": str(path)}}


def run_gan(home: Path, *kills: tuple[Any, ...], prepare: str = LISTED) -> list[Any]:
    document = gan(home, *kills, prepare=prepare)
    assert run_ranks(home, document, world_size=2, recovers=True) == [0, 0]
    return final_state(home, 2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_gan(tmp_path_factory.mktemp("undisturbed"))


POINTS = ("begins", "between pass and step", "between the exchanges", "after the last pass", "ends")


@pytest.mark.parametrize(
    ("point", "prepare"),
    [
        ("between the exchanges", LISTED),
        *(pytest.param(point, LISTED, marks=SOAK) for point in POINTS),
        pytest.param("between the exchanges", AGAIN, marks=SOAK),
        pytest.param("ends", AGAIN, marks=SOAK),
        pytest.param("between the exchanges", TRACKED, marks=SOAK),
        pytest.param("after the last pass", TRACKED, marks=SOAK),
    ],
)
def test_a_gan_that_loses_both_ranks_one_after_the_other_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: list[Any], point: str, prepare: str
) -> None:
    state = run_gan(tmp_path, (0, 0, 3, point), (1, 1, 1, point), prepare=prepare)
    assert sorted(replaced(tmp_path)) == [0, 1]
    assert_same(state, undisturbed)


def test_a_rank_is_lost_in_the_first_batch_with_an_exchange_after_a_step(tmp_path: Path) -> None:
    document = gan(tmp_path, (1, 0, 0, "between the exchanges"))
    assert run_ranks(tmp_path, document, world_size=2, recovers=True) == [1, 1]
    assert not checkpoint_refs(tmp_path)
    for rank in (0, 1):
        (error,) = frames(tmp_path, rank=rank, kind="error")
        assert error["cause"] == "worker_lost"
        assert "for the first time: it exchanged gradients after an optimizer" in error["message"]
        assert "latest checkpoint, or starts over if it has none" in error["message"]


COUNTS_ITSELF = """
    import os, torch
    from dray import train
    train.init(seed=1, checkpoint_every_s=None)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = train.prepare(model, optimizer, loader)
    for number, (x,) in enumerate(loader):
        if number == 5 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), 9)
        model(x).square().mean().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
"""

CHANGES_DATA = """
    import os, torch
    from dray import train
    train.init(seed=1, checkpoint_every_s=None)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = train.prepare(model, optimizer, loader)
    for (x,) in loader:
        now = train.progress().batch
        model.weight.data.mul_(0.9)  # no optimizer's, and unknown to autograd
        model(x).square().mean().backward()
        if now == 5 and os.environ["RANK"] == "0" and FIRST:
            os.kill(os.getpid(), 9)
        optimizer.step()
        optimizer.zero_grad()
""".replace("FIRST", 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"')


@pytest.mark.parametrize("program", [COUNTS_ITSELF, CHANGES_DATA], ids=["counts", "changes"])
def test_copies_that_differ_after_a_handover_end_the_attempt(tmp_path: Path, program: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(program))
    spec = {"script": {"entrypoint": str(path)}}
    assert run_ranks(tmp_path, spec, world_size=2, recovers=True) == [1, 1]
    errors = [error for rank in (0, 1) for error in frames(tmp_path, rank=rank, kind="error")]
    assert {error["cause"] for error in errors} == {"worker_lost"}
    assert all(
        "the ranks had different weights or optimizer states" in e["message"] for e in errors
    )
    recovered = [each["step"] for each in frames(tmp_path, kind="metrics")]
    assert recovered == []
    pages = (last_status(tmp_path, 0, incarnation=1), last_status(tmp_path, 1))
    assert not all(page.is_verified and page.first_at for page in pages)  # no recovery was seen


TARGET = """
    import os, torch
    from dray import train
    train.init(seed=1, checkpoint_every_steps=2)
    torch.manual_seed(0)
    model, target = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(80, 3))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    _, _, loader = train.prepare([model, target], optimizer, loader)
    updates = 0  # a count that prepare() does not know of
    for (x,) in loader:
        now = train.progress().batch
        if now == 5 and os.environ["RANK"] == "0" and FIRST:
            os.kill(os.getpid(), 9)
        with torch.no_grad():
            goal = x.sum(1, keepdim=True) + 0.5 * target(x)
        optimizer.zero_grad()
        (model(x) - goal).square().mean().backward()
        optimizer.step()
        updates += 1
        if updates % 8 == 0:
            target.load_state_dict(model.state_dict())
""".replace("FIRST", 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"')


def test_copies_that_differ_some_batches_after_a_handover_end_the_attempt(tmp_path: Path) -> None:
    path = tmp_path / "target.py"
    path.write_text(textwrap.dedent(TARGET))
    spec = {"script": {"entrypoint": str(path)}}
    assert run_ranks(tmp_path, spec, world_size=2, recovers=True) == [1, 1]
    errors = [error for rank in (0, 1) for error in frames(tmp_path, rank=rank, kind="error")]
    assert {error["cause"] for error in errors} == {"worker_lost"}
    assert replaced(tmp_path) == [0]
    # The ranks differ for the first time after batch 8, which ends with step 8.
    assert max(ref.step for ref in checkpoint_refs(tmp_path)) <= 8


OWN_WEIGHTS = """
    import os, torch
    from dray import train
    train.init(seed=1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(40, 3), batch_size=4)
    model, optimizer, loader = train.prepare(model, optimizer, loader)
    torch.nn.init.constant_(model.weight, float(os.environ["RANK"]))
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
"""


def test_weights_that_a_script_makes_different_before_its_first_exchange_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(OWN_WEIGHTS))
    spec = {"script": {"entrypoint": str(path)}}
    assert run_ranks(tmp_path, spec, world_size=2, recovers=True) == [1, 1]
    errors = [error for rank in (0, 1) for error in frames(tmp_path, rank=rank, kind="error")]
    assert all("behaved differently on some ranks" in error["message"] for error in errors)
    assert "worker_lost" not in {error["cause"] for error in errors}


def test_complex_parameters_are_exchanged() -> None:
    run_in_group(_complex_parameters, 2)


def _complex_parameters(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train.init()
    train.prepare(model, optimizer)
    (model.weight * (1 + rank)).abs().square().sum().backward()
    optimizer.step()
    # The gradient of |(1 + r) w|^2 is 2 (1 + r)^2 w, which is 2 and 8 at w = 1, and 5 on average.
    torch.testing.assert_close(model.weight.detach(), torch.full((2,), -1.5 + 0j))


@ONE_SET
@pytest.mark.parametrize("laid_out", ["rows", "columns", "channels last"])
def test_samples_find_any_element_that_differs_after_some_exchanges(laid_out: str) -> None:
    weight = torch.zeros(8, 3, 5, 5)
    if laid_out == "columns":
        weight = weight.permute(3, 2, 1, 0)
    elif laid_out == "channels last":
        weight = weight.to(memory_format=torch.channels_last)
    model = nn.ParameterList([weight, torch.zeros(3), torch.zeros((), dtype=torch.bfloat16)])
    trained = Trained([model], [])
    num_samples = 20
    before = [trained.sample(number) for number in range(num_samples)]
    for parameter in model:
        for index in np.ndindex(*parameter.shape):
            with torch.no_grad():
                parameter[index] = 1.0
                assert [trained.sample(number) for number in range(num_samples)] != before
                parameter[index] = 0.0


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_state", preparing._State())


def parts() -> tuple[list[nn.Module], list[torch.optim.Optimizer], DataLoader[Any]]:
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 1)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model.parameters(), lr=0.1) for model in models
    ]
    return models, optimizers, DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)


@pytest.mark.usefixtures("_fresh")
def test_an_optimizer_that_prepare_was_not_given_is_refused_at_its_first_step() -> None:
    models, optimizers, loader = parts()
    train.init()
    _, _, loader = train.prepare(models, optimizers[:1], loader)  # type: ignore[assignment]
    for (x,) in loader:
        models[1](models[0](x)).sum().backward()
        optimizers[0].step()
        with pytest.raises(ValueError, match="pass all optimizers to prepare"):
            optimizers[1].step()
        break
    stranger = nn.Linear(2, 1)
    other = torch.optim.SGD(stranger.parameters(), lr=0.1)
    stranger(torch.ones(1, 2)).sum().backward()
    other.step()  # of an unprepared model


@pytest.mark.usefixtures("_fresh")
def test_a_scheduler_for_each_optimizer_is_given_as_a_list() -> None:
    models, optimizers, loader = parts()
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1) for one in optimizers]
    train.init()
    train.prepare(models, optimizers, loader, scheduler=schedulers)
    prepared = preparing._state.prepared
    assert prepared is not None
    assert prepared.session.tracked == {
        "scheduler.0": schedulers[0],
        "scheduler.1": schedulers[1],
    }


@pytest.mark.usefixtures("_fresh")
def test_what_a_second_call_can_not_have_is_refused() -> None:
    models, optimizers, loader = parts()
    train.init()
    train.prepare(models[0], optimizers[0], loader)
    with pytest.raises(RuntimeError, match="a second loader"):
        train.prepare(models[1], optimizers[1], loader)
    with pytest.raises(ValueError, match="only the first call can track objects"):
        train.prepare(models[1], optimizers[1], scheduler=models[1])
    prepared = preparing._state.prepared
    assert prepared is not None
    assert prepared.loader is not None
    next(iter(prepared.loader))
    with pytest.raises(RuntimeError, match="after the first batch"):
        train.prepare(models[1], optimizers[1])


def test_buffers_of_each_rank_stay_its_own_where_that_is_asked_for() -> None:
    run_in_group(_own_buffers, 2)


def _own_buffers(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.manual_seed(0)
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2)), batch_size=4)
    train.init()
    model, optimizer, loader = train.prepare(model, optimizer, loader, broadcast_buffers=False)
    for (x,) in loader:
        model(x).square().sum().backward()
        optimizer.step()
    means = [torch.zeros(2) for _ in range(2)]
    torch.distributed.all_gather(means, model.running_mean)
    assert not torch.equal(*means)


def test_a_digest_changes_with_every_bit_and_with_the_order() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (1, 5, 20_000)]
    found = digest(tensors)
    assert found == digest([tensor.clone() for tensor in tensors])
    assert found != digest(tensors[::-1])
    for tensor in tensors:
        words = tensor.view(torch.int32)
        for index in {0, len(words) // 2, len(words) - 1}:
            for bit in (0, 13, 31):
                words[index] ^= 1 << bit if bit < 31 else -(1 << 31)
                assert digest(tensors) != found
                words[index] ^= 1 << bit if bit < 31 else -(1 << 31)
    big = tensors[2]
    big[[3, 17_000]] = big[[17_000, 3]]
    assert digest(tensors) != found
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])
    assert digest([torch.zeros(2, 3)]) != digest([torch.zeros(3, 2)])
    assert digest([torch.zeros(3, dtype=torch.bool)]) != digest([torch.ones(3, dtype=torch.bool)])


def test_models_on_several_devices_are_refused_before_anything_is_exchanged() -> None:
    exchange = GradientExchange([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(
        ValueError, match=r"are on cpu and meta: move all of them to the rank's GPU"
    ):
        exchange.run(1.0, 0, 0)
