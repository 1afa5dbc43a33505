"""Valid job documents, and where errors in others point."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dray.input import validation
from dray.spec import RECIPES, JobSpec
from dray.spec.program.model import Mlp
from dray.spec.program.recipes import MINIMISED
from dray.spec.training.sync import Gossip, ParameterServer
from tests.unit.spec.job_documents import SCRIPT, check_refusal, divided, images, recipe, refusal


def masks(**fields: Any) -> dict[str, Any]:
    return recipe("image_segmentation", **fields)


def classes(**fields: Any) -> dict[str, Any]:
    return recipe("tabular_classification", **fields)


def text(**fields: Any) -> dict[str, Any]:
    return recipe("language_model", **fields)


def ranged(*batch_range: int, train: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """An elastic job of four workers with a range for its batch."""
    options = {"global_batch_size": 64, "batch_range": batch_range, "measure_noise": True}
    return divided(
        {}, train={**options, **(train or {})}, **{"elastic": {"min_workers": 1}, **fields}
    )


def test_a_batch_range_counts_steps_by_its_least_batch() -> None:
    train = JobSpec.model_validate(ranged(32, 256)).train
    assert (train.samples_per_step, train.batch_scaling) == (32, "sqrt")
    assert JobSpec.model_validate(divided({})).train.samples_per_step == 256


DIVISOR = "must divide both the end of the range and train.global_batch_size, but does not"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (ranged(65, 256), "must include train.global_batch_size, which is 64"),
        (ranged(32, 48), "must include train.global_batch_size, which is 64"),
        (ranged(24, 256), f"starts at 24, which {DIVISOR}"),
        (ranged(32, 100), f"starts at 32, which {DIVISOR}"),
        (ranged(2, 256), "must start at 4 or more, one sample for each worker"),
        (ranged(32, 256, elastic=None), "requires elastic.by_speed"),
        (
            ranged(32, 256, elastic={"min_workers": 1, "by_speed": False}),
            "requires elastic.by_speed",
        ),
        (ranged(32, 256, train={"measure_noise": False}), "requires train.measure_noise"),
        (ranged(32, 256, train={"ema": {}}), "can't be combined with train.ema"),
        (ranged(32, 256, profile={}), "can't be combined with profile"),
        (
            ranged(32, 256, checkpoint={"every_steps": "auto"}),
            "can't be combined with checkpoint.every_steps: auto",
        ),
    ],
)
def test_a_batch_range_that_could_not_be_kept_is_refused(
    document: dict[str, Any], message: str
) -> None:
    pointer, said = refusal(document)
    assert pointer == "/train/batch_range"
    assert said.startswith(message)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_a_model_gets_its_first(name: str) -> None:
    model = JobSpec.model_validate(recipe(name)).model
    assert model is not None
    assert model.name == RECIPES[name].models[0]
    option = {"language_model": "num_heads", "fine_tuning": "base"}.get(name, "width")
    value = "file:///other" if option == "base" else 2
    chosen = JobSpec.model_validate(recipe(name, model={option: value})).model
    assert getattr(chosen, option) == value


@pytest.mark.parametrize("name", RECIPES)
def test_a_document_survives_its_own_json(name: str) -> None:
    spec = JobSpec.model_validate(recipe(name))
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_a_document_as_it_was_stored_before_there_were_more_models_is_read() -> None:
    model = {"name": "cnn", "width": 32, "dropout": 0.0}
    data = {"source": "sklearn://digits", "validation_fraction": 0.2}
    script = {"script": {"entrypoint": "train.py", "args": []}, "model": model, "data": data}
    assert JobSpec.model_validate(script).script is not None
    assert JobSpec.model_validate(images(model=model, data=data))


@pytest.mark.parametrize(
    ("document", "pointer", "message"),
    [
        (text(model={"name": "cnn"}), "/model/name", "must be one of gpt"),
        (recipe("tabular_regression", data={}), "/data/source", "sklearn://diabetes"),
        (text(data={}), "/data/source", "supports no scikit-learn data sets"),
        (
            classes(data={"source": "s3://b/x.csv"}),
            "/data/target",
            "names the csv column to predict",
        ),
        (
            classes(data={"source": "s3://b/folder/"}),
            "/data/format",
            "the extension of the source is not one of",
        ),
        (
            images(data={"source": "s3://b/x.csv"}),
            "/data/source",
            "is csv, but this recipe reads only images, npz",
        ),
        (
            images(data={"source": "s3://b/x", "format": "text"}),
            "/data/format",
            "is text, but this recipe reads",
        ),
        *(
            (classes(data={"source": "s3://b/x.csv", "target": "y", **options}), pointer, message)
            for options, pointer, message in (
                ({"delimiter": "a"}, "/data/delimiter", "String should match pattern"),
                ({"delimiter": ";;"}, "/data/delimiter", "String should match pattern"),
                ({"encoding": "klingon"}, "/data/encoding", "must be a text encoding that Python"),
                ({"encoding": "base64"}, "/data/encoding", "must be a text encoding that Python"),
                (
                    {"decimal": ","},
                    "/data/decimal",
                    "is a comma, but data.delimiter is also a comma",
                ),
            )
        ),
        (
            classes(data={"source": "sklearn://iris", "missing": "mean"}),
            "/data/missing",
            "is only for csv, parquet, but the format of the data is sklearn",
        ),
        (
            classes(
                data={"source": "s3://b/x.csv", "target": "y", "missing_columns": {"y": "mean"}}
            ),
            "/data/missing_columns",
            "must be error or drop for the target 'y'",
        ),
        (
            images(data={"image_size": [8, 8]}),
            "/data/image_size",
            "is only for images, but the format of the data is sklearn",
        ),
        (
            images(data={"source": "s3://b/x", "target": "y"}),
            "/data/target",
            "is only for npz, csv, parquet",
        ),
        (images(checkpoint={"best": "val/mae"}), "/checkpoint/best", "must be one of val/loss"),
        (
            recipe("tabular_regression", train={"early_stopping": {"metric": "val/f1"}}),
            "/train/early_stopping/metric",
            "val/r2",
        ),
        (
            recipe("tabular_regression", train={"label_smoothing": 0.1}),
            "/train/label_smoothing",
            "is only for classification",
        ),
        (masks(data={}), "/data/source", "supports no scikit-learn data sets"),
        (masks(model={"name": "cnn"}), "/model/name", "must be one of unet"),
        (images(model={"name": "unet"}), "/model/name", "one of cnn, resn"),
        (
            masks(data={"source": "s3://b/x.csv"}),
            "/data/source",
            "is csv, but this recipe reads only images, npz",
        ),
        (
            images(data={"source": "s3://b/x", "classes": ["a", "b"]}),
            "/data/classes",
            "is only for image_segmentation",
        ),
        (
            masks(data={"source": "s3://b/x", "image_size": [31, 64]}),
            "/data/image_size",
            "is 31 x 64; a unet of depth 4 requires sides of at least 32 pixels",
        ),
        (
            masks(train={"label_smoothing": 0.1}),
            "/train/label_smoothing",
            "is only for classification",
        ),
        (
            masks(checkpoint={"best": "val/f1"}),
            "/checkpoint/best",
            "must be one of val/loss, val/dice, val/iou, val/accuracy",
        ),
        (
            masks(train={"early_stopping": {"metric": "val/auroc"}}),
            "/train/early_stopping/metric",
            "must be one of val/loss, val/dice",
        ),
        (
            images() | {"train": {"measure_noise": True}},
            "/train/measure_noise",
            "requires resources.num_workers 2",
        ),
        (SCRIPT | {"profile": {}}, "/profile", "a script can call torch.profiler"),
        (
            images(profile={"ranks": [0, 1]}),
            "/profile/ranks",
            "must be below resources.num_workers, which is 1",
        ),
        (
            images(resources={"num_workers": 300}),
            "/train/global_batch_size",
            "less than one sample for each of the 300 workers",
        ),
        (SCRIPT | {"init_from": {"job": "job-1"}}, "/init_from", "is only for recipes"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_where_the_fault_is(
    document: dict[str, Any], pointer: str, message: str
) -> None:
    check_refusal(document, pointer, message)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("ftp://host/x.csv", "must be a URL that begins with one of file://"),
        ("digits", "must be a URL"),
        ("sklearn://faces", "must be one of scikit-learn's data sets"),
        ("file://relative/x.csv", "must have an absolute path"),
        ("https:///x.csv", "names no host"),
        ("https://host:99999/x.csv", "is not a URL"),
        ("s3:///key", "names no bucket"),
        ("https://me:secret@host/x.csv", "must not contain a user name or password"),
        ("https://host/x.csv?X-Amz-Signature=abc", "must not contain a secret"),
        *(
            (f"https://host/x.csv?a=b&{name}=abc", f"the parameter '{name}' looks like one")
            for name in (
                *("access_token", "accessToken", "apikey", "api_key", "x_sig", "auth", "pass"),
                *("pwd", "passwd", "dbPassword", "secrets"),
            )
        ),
        ("https://host/../../x.csv", "must not contain '..'"),
        ("file:///a%00b.csv", "must not contain %00"),
        ("https://host\\@elsewhere/x.csv", "must not contain a backslash"),
        ("https://host/a b.csv", "must not contain a backslash or a space"),
    ],
)
def test_a_source_is_a_url_without_secrets(source: str, message: str) -> None:
    document = recipe("tabular_classification", data={"source": source, "target": "y"})
    pointer, said = refusal(document)
    assert pointer == "/data/source"
    assert message in said


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"optimizer": {"momentum": 0.9}}, "momentum is an option of sgd and lars, not of adamw"),
        ({"optimizer": {"name": "adafactor", "eps": 1e-3}}, "eps is an option of adamw"),
        ({"optimizer": {"name": "sgd", "nesterov": True}}, "nesterov requires a momentum"),
        ({"schedule": {"name": "step"}}, "requires every_steps"),
        ({"schedule": {"name": "cosine", "factor": 0.5}}, "factor is an option of step"),
        ({"schedule": {"name": "step", "every_steps": 5, "final_ratio": 0.1}}, "final_ratio is an"),
        ({"lr_scaling": {"rule": "cubic", "reference_batch_size": 2}}, "'linear' or 'sqrt'"),
        ({"ema": {"decay": 1.0}}, "less than 1"),
    ],
)
def test_options_that_would_be_ignored_are_refused(train: dict[str, Any], message: str) -> None:
    _, said = refusal(images(train=train))
    assert message in said


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["cell"], "at least 2 items"),
        ([f"organ {number}" for number in range(256)], "at most 255 items"),
        (["background", "cell", "cell"], "lists 'cell' twice"),
        (["background", ""], "at least 1"),
        (["background", 1], "valid string"),
        ("cell", "valid list"),
    ],
)
def test_the_classes_of_masks_are_names(classes: Any, message: str) -> None:
    data = {"source": "file:///scans", "classes": classes}
    pointer, said = refusal(masks(data=data))
    assert pointer.startswith("/data/classes")
    assert message in said


def test_of_the_overlap_of_masks_more_is_better() -> None:
    """So the best checkpoint is that with the most, and early stopping waits for more."""
    assert set(RECIPES["image_segmentation"].metrics) & MINIMISED == {"val/loss"}


@pytest.mark.parametrize(
    ("option", "value"), [("depth", 0), ("depth", 9), ("width", 0), ("dropout", 1.0)]
)
def test_a_unet_has_a_size_that_can_be_built(option: str, value: Any) -> None:
    pointer, _ = refusal(masks(model={option: value}))
    assert pointer.endswith(f"/{option}")


def test_the_heads_of_a_gpt_share_its_width() -> None:
    model = {"width": 10, "num_heads": 4}
    _, said = refusal(recipe("language_model", model=model))
    assert "width is 10, but must be a multiple of 2 x num_heads" in said


@pytest.mark.parametrize("every", [1, 10**12, None, "auto"])
def test_the_interval_of_checkpoints_is_a_number_or_left_to_dray(every: Any) -> None:
    document = images(checkpoint={"every_steps": every})
    assert JobSpec.model_validate(document).checkpoint.every_steps == every


@pytest.mark.parametrize("every", [0, -1, 10**12 + 1, "always", "10", True, 1.5, [5]])
def test_any_other_interval_of_checkpoints_is_refused_where_it_stands(every: Any) -> None:
    document = images(checkpoint={"every_steps": every})
    with pytest.raises(validation.Fault, match="'auto'") as caught:
        validation.check(document)
    assert caught.value.pointer == "/checkpoint/every_steps"


def test_an_elastic_script_shares_its_batches_out_as_prepare_does() -> None:
    script = {"script": {"entrypoint": "a.py"}, "resources": {"num_workers": 4}}
    spec = JobSpec.model_validate(script | {"elastic": {"min_workers": 2}})
    assert spec.elastic is not None
    with pytest.raises(ValidationError, match="does not know which loss"):
        JobSpec.model_validate(script | {"elastic": {"min_workers": 2, "exact": True}})


def test_an_elastic_job_says_with_how_few_it_goes_on() -> None:
    fields = {"elastic": {"min_workers": 2}, "resources": {"num_workers": 4}}
    spec = JobSpec.model_validate(images(**fields))
    assert spec.elastic is not None
    assert spec.elastic.min_workers == 2
    assert JobSpec.model_validate(images(elastic=None)).elastic is None


@pytest.mark.parametrize(
    "parts",
    [
        {"sync": Gossip()},
        {"sync": ParameterServer()},
        {"sync": "auto"},
        {"model": Mlp()},
        {"model": {"name": "resnet"}},
    ],
)
def test_a_document_without_defaults_still_names_its_classes(parts: dict[str, Any]) -> None:
    spec = JobSpec.model_validate({**images(resources={"num_workers": 3}), **parts})
    for document in (spec.as_given(), spec.without_defaults()):
        assert JobSpec.model_validate(document) == spec


def test_a_trial_keeps_the_kind_of_sync() -> None:
    spec = JobSpec.model_validate(
        {
            **images(resources={"num_workers": 2}),
            "sync": Gossip(),
            "sweep": {
                "metric": "val/loss",
                "sampler": "grid",
                "parameters": {"train.seed": [1, 2]},
            },
        }
    )
    assert spec.of_trial({"train.seed": 1})["sync"] == {"kind": "gossip"}


@pytest.mark.parametrize(
    ("pointer", "fields"),
    [
        ("/version", {"version": True}),
        ("/parallel/zero", {"parallel": {"shard": 2, "zero": True}}),
        ("/model/resnet/depth", {"model": {"name": "resnet", "depth": "8"}}),
    ],
)
def test_a_choice_of_numbers_is_a_number(pointer: str, fields: dict[str, Any]) -> None:
    document = {"recipe": "image_classification", "resources": {"num_workers": 2}, **fields}
    check_refusal(document, pointer, "number")
