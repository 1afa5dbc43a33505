"""The catalogue of models: its file, the names in documents, and licences."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dray.spec import JobSpec, Pretrained
from service.config import node_policies
from service.config.models_file import BadModelsFile, ModelsFile
from service.config.settings import Settings
from service.domain.errors import InvalidDocument, LicenceNotAccepted
from service.jobs import catalogue

FREE = {"name": "free", "base": "file:///srv/models/free", "sha256": "a" * 64}
LICENSED = {"licence": "Community License", "must_accept": True}
GUARDED: dict[str, Any] = {
    "name": "guarded-8b",
    "base": "file:///srv/my%20models/guarded",
    **LICENSED,
    "chat_template": "{{ messages }}\n",
    "credentials": "shop",
}


BEST_OF_REWARD = {"checkpoint": {"best": "val/margin"}}


def write(path: Path, *models: Any) -> Path:
    path.write_text(json.dumps({"models": models}))
    return path


@pytest.fixture
def file(tmp_path: Path) -> ModelsFile:
    return ModelsFile(write(tmp_path / "models.yaml", FREE, GUARDED))


def resolved(file: ModelsFile, **model: Any) -> Any:
    sweep = model.pop("sweep", None)
    document = {"recipe": "fine_tuning", "model": model, "data": {"source": "file:///d.jsonl"}}
    if sweep is not None:
        document["sweep"] = {"parameters": sweep, "metric": "val/loss", "sampler": "grid"}
    spec = JobSpec.model_validate(document)
    return catalogue.resolve(spec, file.current() or {}).model


def test_a_name_becomes_an_address(file: ModelsFile) -> None:
    model = resolved(file, base="free", adapter="lora")
    assert (model.base, model.catalogue) == (FREE["base"], "free")
    assert (model.sha256, model.accept_licence, model.adapter.rank) == ("a" * 64, False, 16)
    other = resolved(file, base="file:///srv/models/other", catalogue="free")
    assert (other.base, other.catalogue, other.sha256) == ("file:///srv/models/other", None, None)


@pytest.mark.parametrize("base", ["guarded-8b", GUARDED["base"], "file:///srv/my models/guarded/"])
def test_a_licence_is_accepted_whether_a_name_or_an_address_is_given(
    file: ModelsFile, base: str
) -> None:
    base = base.replace(" ", "%20")
    with pytest.raises(LicenceNotAccepted, match="Community License") as refused:
        resolved(file, base=base)
    assert refused.value.pointer == "/model/accept_licence"
    with pytest.raises(LicenceNotAccepted, match="accepts the licence 'MIT'"):
        resolved(file, base=base, accept_licence="MIT")
    for accepted in (True, "Community License"):
        model = resolved(file, base=base, accept_licence=accepted)
        assert (model.catalogue, model.accept_licence) == ("guarded-8b", "Community License")
        assert (model.credentials, model.chat_template) == ("shop", "{{ messages }}\n")


WEB = {"name": "web", "base": "https://models.example/llama", **LICENSED}
HUB = {"name": "hub", "base": f"hf://Org/Llama@{'a' * 40}", **LICENSED}
AT_HUB = f"Org/Llama/resolve/{'a' * 40}"


@pytest.mark.parametrize(
    "base",
    [
        "file:/srv/my%20models/guarded",
        "file:///srv//my%20models/./guarded//",
        "file:///srv/my%20models/%67uarded?x=1",
        "file:///srv/my%20models/guarded#x",
        "file:///srv/%2e%2e/srv/my%20models/guarded",
        "https://MODELS.example/llama/",
        "https://models.example.:443/llama?x=1",
        "https://models.example//l%6cama",
        "http://models.example/llama",
        HUB["base"].replace("Org", "org"),
        f"https://huggingface.co/{AT_HUB}",
        f"https://hf.co/{AT_HUB.lower()}/",
    ],
)
def test_no_spelling_of_an_address_evades_a_licence(tmp_path: Path, base: str) -> None:
    models = {one["name"]: one for one in (GUARDED, WEB, HUB)}
    file = ModelsFile(write(tmp_path / "models.yaml", *models.values()))
    with pytest.raises(LicenceNotAccepted):
        resolved(file, base=base)
    model = resolved(file, base=base, accept_licence=True)
    assert model.base == models[model.catalogue]["base"]


@pytest.mark.parametrize(
    "base",
    [
        "file:///srv/models",
        "s3://models.example/llama",
        "https://models.example:8443/llama",
        "https://models.example/Llama",
        "https://models.example/get?model=b",
        f"https://huggingface.co/Org/Llama-2/resolve/{'a' * 40}",
        f"https://huggingface.co/Other/Llama/resolve/{'a' * 40}",
        f"https://mirror.example/{AT_HUB}",
    ],
)
def test_other_addresses_are_other_models(tmp_path: Path, base: str) -> None:
    asked = {"name": "asked", "base": "https://models.example/get?model=a", **LICENSED}
    file = ModelsFile(write(tmp_path / "models.yaml", GUARDED, WEB, HUB, asked))
    assert resolved(file, base=base).catalogue is None


COPY = {
    "name": "copy",
    "base": "file:///srv/copy",
    **LICENSED,
    "sha256": "b" * 64,
    "repositories": ["meta-llama/Llama-3.2-1B"],
}
OTHER_REVISIONS = (
    HUB["base"].replace("aa", "ab"),
    "https://huggingface.co/Org/Llama/resolve/main",
    "https://hf.co/org/llama/raw/main/",
    "https://huggingface.co/api/resolve-cache/models/Org/Llama/main",
    f"hf://meta-llama/Llama-3.2-1B@{'c' * 40}",
    f"hf://Meta-Llama/llama-3.2-1b@{'d' * 40}",
)


@pytest.mark.parametrize("base", OTHER_REVISIONS)
def test_a_licence_applies_to_each_revision_of_a_repository(tmp_path: Path, base: str) -> None:
    file = ModelsFile(write(tmp_path / "models.yaml", HUB, COPY))
    with pytest.raises(LicenceNotAccepted, match="is in the same repository") as refused:
        resolved(file, base=base)
    assert refused.value.pointer == "/model/accept_licence"
    with pytest.raises(LicenceNotAccepted, match="accepts the licence 'MIT'"):
        resolved(file, base=base, accept_licence="MIT")
    for accepted in (True, "Community License"):
        model = resolved(file, base=base, accept_licence=accepted)
        # The revision is still the user's, and the folder of the operator's is not opened.
        assert (model.base, model.catalogue, model.sha256) == (base, None, None)
        assert model.accept_licence == "Community License"
        assert resolved(file, **model.model_dump(mode="json")) == model
    with pytest.raises(InvalidDocument, match=r"can't vary model\.base"):
        resolved(file, base="file:///a", sweep={"model.base": ["file:///a", base]})


def test_a_licence_applies_to_a_document_with_the_hash_of_the_model(tmp_path: Path) -> None:
    file = ModelsFile(write(tmp_path / "models.yaml", COPY))
    given = {"base": "file:///etc", "sha256": "b" * 64}
    with pytest.raises(LicenceNotAccepted, match=r"model\.sha256 is the hash of its files"):
        resolved(file, **given)
    model = resolved(file, **given, accept_licence=True)
    assert (model.base, model.catalogue) == ("file:///etc", None)
    settings = Settings(home=tmp_path, tokens_file=tmp_path / "tokens")
    document = {"recipe": "fine_tuning", "model": model.model_dump(mode="json")}
    spec = JobSpec.model_validate({**document, "data": {"source": "file:///d.jsonl"}})
    assert node_policies.data_policy(settings, spec).file_roots == (), "no folder is opened"


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ({"base": "file:///x"}, ["copy"]),
        ({"base": "file:///x", "accept_licence": "Community License"}, []),
        ({"base": "file:///x", "accept_licence": "MIT"}, ["copy"]),
        ({"base": "file:///x", "accept_licence": True}, ["copy"]),
        ({"base": "free"}, []),
    ],
)
def test_nodes_receive_the_hashes_of_models_whose_licence_is_not_accepted(
    tmp_path: Path, model: dict[str, Any], names: list[str]
) -> None:
    """Of GUARDED the hash is unknown, and FREE needs no acceptance."""
    file = ModelsFile(write(tmp_path / "models.yaml", FREE, GUARDED, COPY))
    known = file.current() or {}
    document = {"recipe": "fine_tuning", "model": model, "data": {"source": "file:///d.jsonl"}}
    spec = catalogue.resolve(JobSpec.model_validate(document), known)
    policy = node_policies.data_policy(Settings(home=tmp_path), spec, catalogue=known)
    assert [one.name for one in policy.licensed] == names


@pytest.mark.parametrize("seed", range(60))
def test_every_licence_that_applies_must_be_accepted(tmp_path: Path, seed: int) -> None:
    """Random models, ancestors and acceptances, compared with sets of names."""
    draw = random.Random(seed)
    models: list[dict[str, Any]] = []
    for number in range(draw.randint(1, 5)):
        one: dict[str, Any] = {"name": f"m{number}", "base": f"file:///m{number}"}
        if draw.random() < 0.8:
            one |= {"licence": draw.choice("ABC"), "must_accept": draw.random() < 0.7}
        models.append(one)
    file = ModelsFile(write(tmp_path / "models.yaml", *models))
    known = file.current() or {}
    licences = {one["name"]: one.get("licence") for one in models}
    must = {one["name"] for one in models if one.get("must_accept")}
    name = draw.choice([*licences, "file:///other"])
    ancestors = draw.sample(sorted(licences), draw.randint(0, min(2, len(models))))
    given = draw.choice([False, True, "A", "D", *(draw.sample("ABCD", k) for k in (1, 2, 3))])
    document = {
        "recipe": "fine_tuning",
        "model": {"base": name, "accept_licence": given},
        "data": {"source": "file:///d.jsonl"},
    }
    spec = JobSpec.model_validate(document)
    bases = [Pretrained(base=f"file:///{one}", catalogue=one) for one in ancestors]
    required = {licences[one] for one in {name, *ancestors} & must}
    applying = required | ({licences[name]} - {None} if name in licences else set())
    named = set() if isinstance(given, bool) else set(given)
    accepted = applying if given is True else named
    is_known = bool(applying) or name in licences
    if required - accepted or (named and is_known and not named & applying):
        with pytest.raises(LicenceNotAccepted) as refused:
            catalogue.resolve(spec, known, bases)
        for missing in required - accepted:
            assert f"licence {missing!r}" in refused.value.message.replace("licence, ", "licence ")
        return
    model: Any = catalogue.resolve(spec, known, bases).model
    if given is True and not applying:
        assert model.accept_licence in (True, False)
    else:
        assert set(model.licences) == accepted
    assert catalogue.resolve(spec.model_copy(update={"model": model}), known, bases).model == model


def test_a_stored_document_can_be_submitted_again(file: ModelsFile) -> None:
    model = resolved(file, base="guarded-8b", accept_licence=True)
    assert resolved(file, **model.model_dump(mode="json")) == model


def test_an_unknown_name_is_refused(file: ModelsFile) -> None:
    with pytest.raises(InvalidDocument, match="not in the catalogue: free, guarded-8b") as refused:
        resolved(file, base="guarded-8")
    assert refused.value.hint == "did you mean 'guarded-8b'?"
    with pytest.raises(InvalidDocument, match="this server has no catalogue"):
        resolved(ModelsFile(None), base="free")


@pytest.mark.parametrize(
    ("base", "sweep"),
    [
        ("free", {"model.base": ["file:///a", "file:///b"]}),
        ("file:///a", {"model.base": ["file:///a", "guarded-8b"]}),
        ("file:///a", {"model.base": ["file:///a", GUARDED["base"]]}),
        ("file:///a", {"model.catalogue": ["free"]}),
    ],
)
def test_a_sweep_over_models_of_the_catalogue_is_refused(
    file: ModelsFile, base: str, sweep: Any
) -> None:
    (name,) = sweep
    with pytest.raises(InvalidDocument, match=f"can't vary {name}"):
        resolved(file, base=base, sweep=sweep)
    assert resolved(file, base="file:///a", sweep={"model.base": ["file:///a", "file:///b"]})


def test_a_sweep_over_results_of_jobs_or_broken_addresses_is_refused(file: ModelsFile) -> None:
    with pytest.raises(InvalidDocument, match="results of jobs"):
        resolved(file, base="file:///a", sweep={"model.base": ["file:///a", "job://job-0a"]})
    assert resolved(file, base="file:///a", sweep={"model.base": ["http://[", "http://a:x/"]})


def test_only_jobs_of_a_model_may_read_its_folder(file: ModelsFile, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, tokens_file=tmp_path / "tokens")
    document = {"recipe": "fine_tuning", "data": {"source": "file:///d.jsonl"}}
    for base, roots in (("free", ("/srv/models/free",)), ("file:///srv/models/free2", ())):
        spec = JobSpec.model_validate({**document, "model": {"base": base}})
        spec = catalogue.resolve(spec, file.current() or {})
        assert node_policies.data_policy(settings, spec).file_roots == roots
    assert node_policies.data_policy(settings).file_roots == ()


def test_a_change_of_the_file_takes_effect(tmp_path: Path) -> None:
    path = write(tmp_path / "models.yaml", FREE)
    file = ModelsFile(path)
    write(path, FREE, GUARDED)
    assert list(file.current() or {}) == ["free", "guarded-8b"]
    path.write_text("models: 7")
    assert list(file.current() or {}) == ["free", "guarded-8b"]
    assert "models" in (file.problem or "")
    write(path, GUARDED)
    assert list(file.current() or {}) == ["guarded-8b"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([{"name": "a"}], "models/0/base"),
        ([{"name": "a/b", "base": "file:///a"}], "models/0/name"),
        ([{"name": "a", "base": "/srv/a"}], "file:///path"),
        ([{"name": "a", "base": "b"}], "must be the URL of a folder"),
        ([{**FREE, "must_accept": True}], "must name the licence"),
        ([FREE, FREE], "models/1/name is 'free'"),
        ([{**FREE, "defaults": {"trian": {}}}], "don't form a valid job document: /trian"),
        ([{**FREE, "defaults": {"sweep": {}}}], "can't be a default"),
        ([{**FREE, "sha256": "x"}], "models/0/sha256"),
        ([{**FREE, "repositories": ["llama"]}], "models/0/repositories/0"),
        ([{**FREE, "repositories": ["a/b/c"]}], "models/0/repositories/0"),
        ([{**FREE, "defaults": {"checkpoint": {"best": "val/f1"}}}], "is 'val/f1', which is not a"),
        (
            [{**FREE, "defaults": {"method": {"name": "reward"}, **BEST_OF_REWARD}}],
            "defaults/checkpoint/best is 'val/margin'",
        ),
    ],
)
def test_an_invalid_file_stops_the_start(tmp_path: Path, models: Any, message: str) -> None:
    path = write(tmp_path / "models.yaml", *models)
    with pytest.raises(BadModelsFile, match=message) as refused:
        ModelsFile(path)
    assert str(refused.value).startswith(f"DRAY_MODELS_FILE {path}: ")
