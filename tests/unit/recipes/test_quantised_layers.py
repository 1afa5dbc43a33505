"""Linear layers in NF4 against the definition in the paper, and jobs without the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes.models.quantised import Nf4Linear, quantise
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import ModelError
from tests.unit.recipes import tiny_models as tiny

NEEDS_BITSANDBYTES = "the extra 'nf4' is not installed: bitsandbytes, which holds weights in 4 bits"
CODE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of NF4 (Dettmers et al. 2023, appendix E)."""


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight after quantization, (outputs, inputs), with a loop over its blocks: each
    weight becomes the nearest value of the code times the largest absolute value of its block."""
    code, flat = torch.tensor(CODE), weight.float().flatten()
    blocks = []
    for block in flat.split(64):
        scale = block.abs().max()
        nearest = (block[:, None] / scale - code).abs().argmin(dim=1) if scale > 0 else 7
        blocks.append(code[nearest].expand(len(block)) * scale)
    return torch.cat(blocks).view(weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(64, 64), (16, 16), (24, 16), (7, 6), (3, 130), (128, 192)])
def test_a_layer_is_the_layer_with_rounded_weights(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS_BITSANDBYTES)
    torch.manual_seed(shape[0])
    layer = nn.Linear(shape[1], shape[0])
    layer.weight.requires_grad_(False)
    weight = torch.randn(shape, dtype=torch.float64).to(dtype)
    weight[0, :2] = 0.0
    exact = rounded(weight)
    held = Nf4Linear(layer)
    held.fill(weight)
    torch.testing.assert_close(held.weight_in(torch.float32), exact, rtol=0, atol=1e-6)
    for kind in (torch.float32, torch.bfloat16):
        inputs = torch.randn(5, 3, shape[1], dtype=kind, requires_grad=True)
        same = inputs.detach().clone().requires_grad_()
        bias = layer.bias.detach().to(kind)
        found = held(inputs)
        expected = functional.linear(same, held.weight_in(torch.float32).to(kind)) + bias
        gradient = torch.randn_like(expected)
        found.backward(gradient)
        expected.backward(gradient)
        assert torch.equal(found, expected)
        assert inputs.grad is not None
        assert same.grad is not None
        torch.testing.assert_close(inputs.grad, same.grad, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert held(torch.randn(2, shape[1])).dtype == torch.bfloat16
    held_bytes = sum(p.numel() * p.element_size() for p in (held.packed, held.scales))
    assert held_bytes == -(-weight.numel() // 64) * (32 + 4)


def test_zeros_stay_zeros() -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS_BITSANDBYTES)
    held = Nf4Linear(nn.Linear(64, 2))
    held.fill(torch.zeros(2, 64))
    assert not held.weight_in(torch.float32).any()


def test_the_output_layer_and_shared_weights_stay_as_they_are() -> None:
    class TiedLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
            self.first, self.tied = nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
            self.output = nn.Linear(4, 8)
            self.tied.weight = self.embedding.weight
            self.trained = nn.Linear(4, 4)
            self.requires_grad_(False)
            self.trained.requires_grad_(True)

        def get_output_embeddings(self) -> nn.Module:
            return self.output

    model = TiedLayers()
    quantise(model)
    changed = [name for name, one in model.named_modules() if isinstance(one, Nf4Linear)]
    assert changed == ["first"]
    with pytest.raises(ModelError, match="no linear layers that can be quantized"):
        quantise(model)


def test_a_node_without_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="the extra 'tuning' is not installed")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    base = tiny.make_base(tmp_path / "base")
    examples = tiny.write_lines(tmp_path / "data.jsonl", tiny.texts(8))
    document = tiny.document(
        base,
        examples,
        model={"adapter": {"kind": "lora", "base_precision": "nf4"}},
        train={"precision": "bf16", "global_batch_size": 2},
    )
    with pytest.raises(ModelError, match=r"the package bitsandbytes: pip install 'dray\[nf4\]'"):
        recipes.RECIPES["fine_tuning"].build(
            JobSpec.model_validate(document), DataPolicy.open(str(tmp_path / "cache"))
        )
