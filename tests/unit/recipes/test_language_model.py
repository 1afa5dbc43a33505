from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes.models import gpt
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.workload import Workload
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import SOAK

SMALL = {"name": "gpt", "num_layers": 2, "num_heads": 2, "width": 16, "context_length": 8}
SENTENCE = "the quick brown fox jumps over the lazy dog. "


def build(path: Path, **model: Any) -> Workload:
    document = {"recipe": "language_model", "data": {"source": path.as_uri()}}
    spec = JobSpec.model_validate(document | {"model": SMALL | model})
    work = recipes.RECIPES["language_model"].build(spec, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), spec.train.seed)
    return work


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(SENTENCE * 20)
    return path


def test_samples_are_windows_whose_targets_are_one_byte_ahead(text: Path) -> None:
    work = build(text)
    inputs, targets = work.train.take(torch.tensor([0, 1]))
    data = (SENTENCE * 20).encode()
    assert inputs.tolist() == [list(data[:8]), list(data[8:16])]
    assert targets.tolist() == [list(data[1:9]), list(data[9:17])]
    assert len(work.train) + len(work.validation) == (len(data) - 1) // 8
    last_trained = work.train.take(torch.tensor([len(work.train) - 1]))
    first_kept = work.validation.take(torch.tensor([0]))
    assert last_trained[1][0, -1] == first_kept[0][0, 0], "validation is what comes after"


def test_a_token_sees_only_what_is_before_it(text: Path) -> None:
    model = build(text).model.eval()
    ids = torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 5:] += 100
    with torch.no_grad():
        one, other = model(ids), model(changed)
    torch.testing.assert_close(one[:, :5], other[:, :5])
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_a_fresh_model_is_as_good_as_a_guess(text: Path) -> None:
    work = build(text)
    inputs, targets = work.train.take(torch.arange(4))
    loss = work.loss_sum(work.model(inputs), targets) / 4
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.2)


@SOAK
def test_the_result_goes_on_from_a_prompt(text: Path, tmp_path: Path) -> None:
    work = build(text)
    work.write_results(work.model, {"val/perplexity": 9.0}, 3, tmp_path)
    generator = recipes.load(tmp_path)
    predicted = generator.predict("the quick", num_tokens=5)
    assert predicted == generator.predict("the quick", num_tokens=5)
    drawn = [generator.predict("the", num_tokens=20, temperature=1.0, seed=s) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ValueError, match="prompt is empty"):
        generator.predict("")


def test_a_tokenizer_file_makes_the_tokens_and_goes_with_the_result(
    text: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"])
    tokenizer.train_from_iterator([SENTENCE], trainer)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    work = build(text, tokenizer=file.as_uri())
    inputs, _ = work.train.take(torch.tensor([0]))
    assert tokenizer.decode(inputs[0].tolist()) == "the quick brown fox jumps over the lazy"
    result = tmp_path / "result"
    result.mkdir()
    work.write_results(work.model, {}, 3, result)
    words = recipes.load(result).predict("the quick", num_tokens=3).split()
    assert set(words) <= {*SENTENCE.replace(".", " .").split(), "[UNK]"}


def test_too_short_a_text_is_the_datas_fault(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short")
    with pytest.raises(DataError, match="has 9 tokens, too few"):
        build(path)


def test_attention_depends_on_distances_not_on_positions() -> None:
    angles = gpt.rotations(0, 12, 8, torch.device("cpu"))
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(at: int, seen: int) -> float:
        places = [gpt.rotate(v, angles[:, [n]]) for v, n in ((query, at), (key, seen))]
        return (places[0] * places[1]).sum().item()

    assert score(5, 2) == pytest.approx(score(11, 8), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 4), abs=1e-2)
