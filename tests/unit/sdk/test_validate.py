"""Validating a document offline gives the same answer as the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dray
from dray import errors
from tests.unit.api.serving import LiveServer

JOB = {"recipe": "image_classification"}
MEANT_BATCH = "did you mean 'global_batch_size'?"


@pytest.mark.parametrize(
    ("document", "pointer", "hint"),
    [
        ({}, "", None),
        ({"recipe": "image_clasification"}, "/recipe", "did you mean 'image_classification'?"),
        ({**JOB, "trian": {}}, "/trian", "did you mean 'train'?"),
        ({**JOB, "train": {"epochs": 0}}, "/train/epochs", None),
        ({**JOB, "epochs": 3}, "/epochs", "did you mean '/train/epochs'?"),
        ({**JOB, "train": {"lr": 3}}, "/train/lr", "did you mean '/train/optimizer/lr'?"),
        ({**JOB, "batch_size": 8}, "/batch_size", "did you mean '/train/global_batch_size'?"),
        ({**JOB, "train": {"batch_size": 8}}, "/train/batch_size", MEANT_BATCH),
        ({**JOB, "train": {"batchSize": 8}}, "/train/batchSize", MEANT_BATCH),
        ({**JOB, "resources": {"gpus": 1}}, "/resources/gpus", "did you mean 'gpus_per_worker'?"),
        ({**JOB, "learning-rate": 1}, "/learning-rate", "did you mean '/train/optimizer/lr'?"),
        ({**JOB, "train": {"precision": "float16"}}, "/train/precision", "did you mean 'fp16'?"),
        ({**JOB, "max_runtime_s": "2 hours"}, "/max_runtime_s", None),
        ({**JOB, "resources": {"memory_bytes": "8G"}}, "/resources/memory_bytes", None),
        ({**JOB, "num_heads": 3}, "/num_heads", "did you mean '/model/num_heads'?"),
        ({**JOB, "train": 3}, "/train", None),
        ({**JOB, "resources": {"num_workers": True}}, "/resources/num_workers", None),
        ({**JOB, "model": {"widht": 3}}, "/model/widht", "did you mean 'width'?"),
        ({**JOB, "model": {"name": "cnn", "widht": 3}}, "/model/widht", "did you mean 'width'?"),
        ({**JOB, "model": {"name": "resnet", "dept": 8}}, "/model/dept", "did you mean 'depth'?"),
        ({**JOB, "model": {"name": "resnt"}}, "/model/name", "did you mean 'resnet'?"),
        ({**JOB, "model": {"name": 3}}, "/model/name", None),
        (
            {**JOB, "sync": {"graph": "ring"}},
            "/sync/graph",
            "this field requires kind: gossip",
        ),
        (
            {**JOB, "model": {"name": "mlp", "num_heads": 2}},
            "/model/num_heads",
            "this field requires name: gpt",
        ),
        ({"script": {"entrypoint": "a.py"}, "model": {"width": 3}}, "/model/name", None),
        ({**JOB, "model": "cnn"}, "/model", None),
        ({**JOB, "model": {"name": "resnet", "depth": 9}}, "/model/depth", None),
        ({**JOB, "train": {"optimizer": {"nesterov": True}}}, "/train/optimizer", None),
        ({**JOB, "parallel": {"data": 2}}, "/parallel/data", None),
        ({**JOB, "labels": {"~a/ b": "x"}}, "/labels/~0a~1 b", None),
        ({**JOB, "name": "a\0b"}, "/name", None),
        (
            {**JOB, "init_from": {"job": "job-a", "step": "bst"}},
            "/init_from/step",
            "did you mean 'best'?",
        ),
    ],
)
def test_offline_and_online_say_the_same(
    server: LiveServer, document: dict[str, Any], pointer: str | None, hint: str | None
) -> None:
    with pytest.raises(errors.SpecError) as offline:
        dray.validate(document)
    with dray.Client(server.url) as client, pytest.raises(errors.BadRequest) as online:
        client.submit(document)
    found = [(e.detail, e.pointer, e.hint) for e in (offline.value, online.value)]
    assert found[0] == found[1]
    assert found[0][1:] == (pointer, hint)


def test_what_is_a_job_comes_back_with_its_defaults(tmp_path: Path) -> None:
    assert dray.validate(JOB).train.epochs >= 1
    path = tmp_path / "job.json"
    path.write_text('{"recipe": "image_classification", "priority": 7}')
    assert dray.validate(path).priority == dray.validate(str(path)).priority == 7


def test_the_sentence_names_the_file_the_field_and_what_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("recipe: image_classification\nmodel: {name: cnn, widht: 3}\n")
    with pytest.raises(errors.SpecError) as caught:
        dray.validate(path)
    assert str(caught.value) == (
        f"{path}: /model/widht: there is no field 'widht' (did you mean 'width'?)"
    )


def test_a_name_as_long_as_a_book_is_compared_with_nothing() -> None:
    with pytest.raises(errors.SpecError, match="its fields are"):
        dray.validate({**JOB, "train": {"e" * 500_000: 1}})
