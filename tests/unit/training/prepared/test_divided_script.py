"""A prepared script whose model is divided among the ranks, compared with a single process with
plain torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from dray import train
from dray.spec import JobSpec
from dray.train import preparing
from dray.train.prepared import saving
from dray.train.prepared.batches import BatchPlan
from service.domain.attempts.group_traits import may_recover
from tests.marks import SOAK
from tests.unit.training.ranks import checkpoint_refs, frames, run_in_group, run_ranks

PLAN = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_state", preparing._State())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + nn.functional.dropout(added, 0.1, self.training)


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


def samples(size: int = 48) -> TensorDataset:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Residuals()
    groups = [
        {"params": list(model.layers.parameters()), "weight_decay": 0.1},
        {"params": list(model.head.parameters()), "lr": 0.02},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01)


def prepared(size: int = 48, **division: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    preparing._state = preparing._State()
    train.init(seed=5, checkpoint_every_s=None)
    loader = DataLoader(samples(size), batch_size=12, shuffle=True)
    return train.prepare(*built(), loader, **division)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def assert_trains_as_alone(**division: Any) -> None:
    model, optimizer, loader = prepared(**division)
    assert any(isinstance(p, DTensor) for p in model.parameters())
    twin, twin_optimizer = built()
    model.eval()  # dropout masks are generated for each rank's share
    twin.eval()
    session = loader._session
    plan = BatchPlan(DataLoader(samples(), batch_size=12, shuffle=True), session.seed)
    for number, batch in enumerate(loader):
        chosen = plan.share(0, number, 0, 1).indices
        x, y = samples()[chosen]
        own = plan.share(0, number, *session.shard).indices
        assert torch.equal(batch[0], samples()[own][0])
        twin_outputs = nn.functional.mse_loss(twin(samples()[own][0]), samples()[own][1])
        loss = step(model, optimizer, batch)
        torch.testing.assert_close(loss, twin_outputs.detach(), rtol=1e-4, atol=1e-5)
        is_exact = division.get("tensor", 1) == 1 and "compile_blocks" not in division
        if number == 0 and is_exact:
            assert torch.equal(loss, twin_outputs)
        step(twin, twin_optimizer, (x, y))
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.02]
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs, rtol=1e-3, atol=1e-4)


class Tied(Residuals):
    """A model whose first and last layers have the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.last(self.layers[0](self.first(x))))
        return scores


def _tied(**division: Any) -> None:
    ends = []
    for divides in (True, False):
        torch.manual_seed(0)
        model: nn.Module = Tied().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if divides:
            preparing._state = preparing._State()
            train.init(seed=5)
            model, optimizer, _ = train.prepare(model, optimizer, **division)
        step(model, optimizer, samples()[:12])
        ends.append({name: whole(p) for name, p in model.named_parameters()})
        assert model.get_parameter("first.weight") is model.get_parameter("last.weight")
    for name, parameter in ends[1].items():
        torch.testing.assert_close(ends[0][name], parameter, msg=name)


def set_shard(rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))


def test_two_ranks_train_as_one_however_the_model_is_divided(tmp_path: Path) -> None:
    run_in_group(_two, 2)
    run_in_group(_save, 2, str(tmp_path))
    saved = torch.load(tmp_path / "two.pt", weights_only=False)
    model, _, loader = _resumed(saved)
    bias = model.get_parameter("head.bias").detach()
    assert torch.equal(bias, saved["models"][0]["head.bias"])
    assert len(list(loader)) == 2


@SOAK
def test_four_ranks_train_as_one_and_go_on_from_two(tmp_path: Path) -> None:
    run_in_group(_save, 2, str(tmp_path))
    run_in_group(_four, 4, str(tmp_path))


@SOAK
def test_a_job_whose_document_shards_the_model_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    path = Path(__file__).parents[4] / "examples/scripts/sharded.py"

    def run(attempt: int, epochs: int, **options: Any) -> list[int]:
        document = {
            "script": {"entrypoint": str(path), "args": ["--epochs", str(epochs)]},
            "parallel": {"shard": 2},
            "resources": {"num_workers": 2},
        }
        assert run_ranks(tmp_path, document, world_size=2, attempt=attempt, **options) == [0, 0]
        return [body["step"] for body in frames(tmp_path, attempt=attempt, kind="metrics")]

    assert run(1, 1) == list(range(1, 21))
    refs = checkpoint_refs(tmp_path)
    assert [ref.step for ref in refs] == [20]
    files = {path.name for path in Path(refs[0].url.removeprefix("file://")).iterdir()}
    parts = {f"state-g0-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert files == {"manifest.json", "state.json", *parts}
    assert run(2, 2, resume_from=refs) == list(range(21, 41))


def test_a_script_that_leaves_the_division_of_its_document_out_fails(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("from dray import train")
    document = {
        "script": {"entrypoint": str(path)},
        "parallel": {"tensor": 2},
        "resources": {"num_workers": 2},
    }
    assert 0 not in run_ranks(tmp_path, document, world_size=2)
    (error,) = frames(tmp_path, kind="error")
    assert "without calling train.prepare(), which divides the model" in str(error)


def _two(rank: int) -> None:
    set_shard(rank, 2)
    assert_trains_as_alone(blocks="layers.*")
    assert_trains_as_alone(tensor=2, tensor_plan=PLAN)
    kept, recomputed = _after_two(), _after_two(recompute=True)
    assert torch.equal(kept[0], recomputed[0])
    assert (kept[1], recomputed[1]) == (2, 4)
    _adds_up()
    _tied(blocks="layers.*")
    _tied(tensor=2, tensor_plan=PLAN)
    gathered = ColwiseParallel(output_layouts=Replicate())
    _tied(tensor=2, tensor_plan={"first": gathered, "last": gathered})
    _, _, uneven = prepared(size=15, blocks="layers.*")
    with pytest.raises(ValueError, match="make batch_size a multiple of 2"):
        list(uneven)


@SOAK
def test_compiled_blocks_train_as_alone() -> None:
    run_in_group(_compiled, 2)


def _compiled(rank: int) -> None:
    set_shard(rank, 2)
    with mock.patch.object(
        nn.Module, "compile", autospec=True, side_effect=nn.Module.compile
    ) as made:
        assert_trains_as_alone(blocks="layers.*", compile_blocks=True)
    assert made.call_count == 2, "one call for each block"


def _save(rank: int, home: str) -> None:
    set_shard(rank, 2)
    model, optimizer, loader = prepared(blocks="layers.*")
    batches = iter(loader)
    for _ in range(2):
        step(model, optimizer, next(batches))
    next(batches)  # the state belongs to the third batch
    state = loader._session.state()
    if rank == 0:
        torch.save(saving.on_host(state), f"{home}/two.pt")


def _after_two(**division: Any) -> tuple[Tensor, int]:
    """Return a parameter after two steps with dropout, and the number of times that its module was
    computed."""
    model, optimizer, loader = prepared(blocks="layers.*", **division)
    up = model.get_submodule("layers.0.up")
    calls: list[int] = []
    up.register_forward_pre_hook(lambda *_: calls.append(1))
    for _, batch in zip(range(2), loader, strict=False):
        step(model, optimizer, batch)
    return whole(up.weight.detach()), len(calls)  # type: ignore[operator, arg-type]


def _adds_up() -> None:
    model, _, loader = prepared(blocks="layers.*")
    for (x, _), exchanges in zip(loader, (False, True), strict=False):
        if exchanges:
            model(x).sum().backward()
        else:
            with train.no_sync():
                model(x).sum().backward()
    torch.testing.assert_close(whole(model.head.bias.grad), torch.tensor([12.0]))  # type: ignore[union-attr, arg-type]


def _four(rank: int, home: str) -> None:
    set_shard(rank, 4)
    assert_trains_as_alone(blocks="layers.*", shard=2)
    assert_trains_as_alone(blocks="layers.*", tensor=2, tensor_plan=PLAN)
    saved = torch.load(f"{home}/two.pt", weights_only=False)
    for division in (
        {"blocks": "layers.*"},
        {"blocks": "layers.*", "tensor": 2, "tensor_plan": PLAN},
    ):
        model, optimizer, loader = _resumed(saved, **division)
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter.detach()), saved["models"][0][name])
        numbered = [p for group in optimizer.param_groups for p in group["params"]]
        for number, state in saved["optimizers"][0]["state"].items():
            assert torch.equal(
                whole(optimizer.state[numbered[number]]["exp_avg"]), state["exp_avg"]
            )
        assert sum(1 for batch in loader if step(model, optimizer, batch).isfinite()) == 2


def _resumed(saved: Any, **division: Any) -> Any:
    before, saving.load = saving.load, lambda group: saved
    try:
        return prepared(**division)
    finally:
        saving.load = before


def test_names_and_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks='blocks\.\*' matches no module.*layers\.0"):
        prepared(blocks="blocks.*")
    preparing._state = preparing._State()
    with pytest.raises(ValueError, match="tensor is 2, which does not divide the number of"):
        prepared(tensor=2, tensor_plan=PLAN)
    with pytest.raises(ValueError, match="recompute and compile_blocks require blocks"):
        prepared(recompute=True)
    run_in_group(_wrong, 2)


def _wrong(rank: int) -> None:
    set_shard(rank, 2)
    with pytest.raises(
        ValueError, match=r"'layers\.\*\.upper', which matches no module.*layers\.0"
    ):
        prepared(tensor=2, tensor_plan={"layers.*.upper": ColwiseParallel()})
    with pytest.raises(ValueError, match="was given no tensor_plan"):
        prepared(tensor=2)
    model, optimizer = built()
    step(model, optimizer, samples()[:2])
    preparing._state = preparing._State()
    train.init()
    with pytest.raises(ValueError, match="the optimizer already has state"):
        train.prepare(model, optimizer, blocks="layers.*")
    for division, message in (
        (
            {"blocks": "layers.*"},
            "layers.0.up.weight and layers.1.up.weight are the same parameter",
        ),
        (
            {"tensor": 2, "tensor_plan": {"layers.0.up": ColwiseParallel()}},
            "are the same parameter, but tensor_plan divides them in different ways",
        ),
    ):
        preparing._state = preparing._State()
        train.init()
        model, _ = built()
        model.layers[1].up.weight = model.layers[0].up.weight  # type: ignore[index, union-attr]
        with pytest.raises(ValueError, match=message):
            train.prepare(model, torch.optim.SGD(model.parameters()), **division)
    preparing._state = preparing._State(parallel={"shard": 1, "tensor": 1})
    train.init()
    with pytest.raises(ValueError, match=r"parallel\.shard in the job document is 1"):
        train.prepare(*built(), blocks="layers.*", shard=2)


def test_a_lost_rank_of_a_divided_script_is_not_replaced() -> None:
    document = {"script": {"entrypoint": "x.py"}, "resources": {"num_workers": 4}}
    whole_model = JobSpec.model_validate(document)
    parts = JobSpec.model_validate({**document, "parallel": {"shard": 2}})
    assert may_recover(whole_model, num_workers=4, has_gpus=False)
    assert not may_recover(parts, num_workers=4, has_gpus=False)
