"""Data of every source and format, through the whole of dray, with the blocks of the guide."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from PIL import Image

from dray import Client
from dray.spec import Data
from dray.views import JobState
from tests.integration.harness import ROOT, Service, digits, eventually, training_pids
from tests.integration.tour import blocks_of, run_tour
from tests.marks import SOAK
from tests.object_store import ObjectStore, serving_s3
from tests.unit.datasets.web import Answer, Web, serving

PAGE = (ROOT / "docs" / "guides" / "data.md").read_text()
EXAMPLES = sorted((ROOT / "examples" / "data").glob("*.yaml"))
TOUR_TAKES_S = 500


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what make_data.py writes."""
    folder = tmp_path_factory.mktemp("samples")
    script = ROOT / "examples" / "data" / "make_data.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def web(samples: Path) -> Iterator[Web]:
    with serving() as server:
        content = (samples / "wine.csv").read_bytes()
        server.answers["/wine.csv"] = Answer(content, headers={"ETag": '"1"'})
        yield server


@pytest.fixture(scope="module")
def s3(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with serving_s3(tmp_path_factory.mktemp("s3")) as store:
        store.empty()
        store.put("digits.npz", (samples / "digits.npz").read_bytes())
        yield store


@pytest.fixture(scope="module")
def supplied(
    web: Web, s3: ObjectStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A service whose nodes may read this machine's servers, and have credentials for one. Its own
    storage lies on S3, too, reached by the identity of its environment."""
    folder = tmp_path_factory.mktemp("supplied")
    keys = folder / "keys"
    keys.mkdir()
    (keys / "lab.json").write_text(json.dumps({"key": s3.key, "secret": s3.secret}))
    (keys / "lab.json").chmod(0o600)
    service = Service(
        folder / "home",
        {
            "DRAY_LOCAL_SLOTS": "2",
            "DRAY_DATA_PRIVATE_HOSTS": "127.0.0.1",
            "DRAY_DATA_CACHE_DIR": str(folder / "cache"),
            "DRAY_DATA_CREDENTIALS_DIR": str(keys),
            "DRAY_S3_ENDPOINT_URL": s3.endpoint_url,
            "DRAY_STORAGE_URL": "s3://bucket/results",
            "AWS_ENDPOINT_URL": s3.endpoint_url,
            "AWS_ACCESS_KEY_ID": "AKIAOFTHENODE",
            "AWS_SECRET_ACCESS_KEY": "the-nodes-own-secret",
        },
    )
    service.start()
    yield service
    assert service.stop() == 0


@SOAK
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_every_command_of_the_page_does_what_it_says(
    supplied: Service, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB", web.url(""))
    monkeypatch.setenv("BUCKET", "s3://bucket")
    said = run_tour(supplied, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
    made, tables, images, masks, text, from_web, from_s3, fault, refused = said
    assert "wine.csv" in made
    single = ((one, 1) for one in (masks, text, from_web, from_s3))
    for told, jobs in ((tables, 2), (images, 3), *single):
        assert told.count("SUCCEEDED") >= jobs, told
    assert "FAILED" in fault
    assert "data/holey.csv, line 12: the column 'alcohol' has no value" in fault
    assert '"code":"data_source_forbidden"' in refused
    assert '"pointer":"/data/source"' in refused
    with supplied.client as client:
        for document in EXAMPLES:
            assert f"examples/data/{document.name}" in PAGE, "a document that the page does not run"
            name = yaml.safe_load(document.read_text())["name"]
            of_it = [job for job in client.jobs() if job.name == name]
            trained = [job for job in of_it if job.state is JobState.SUCCEEDED]
            assert trained, document.name
            for job in trained:
                assert job.attempt == 1
                assert client.artifacts(job.id)


@SOAK
@pytest.mark.ray
def test_results_and_checkpoints_lie_on_s3(
    supplied: Service, s3: ObjectStore, tmp_path: Path
) -> None:
    spec = digits(checkpoint={"every_steps": 20, "best": "val/accuracy"})
    with supplied.client as client:
        job = client.wait(client.submit(spec).id, timeout_s=90)
        assert job.state is JobState.SUCCEEDED, job.reason
        saved = client.checkpoints(job.id)
        assert saved
        again = client.submit({**spec, "init_from": {"job": job.id, "step": "best"}})
        assert client.wait(again.id, timeout_s=90).state is JobState.SUCCEEDED
        downloaded = client.download(job.id, tmp_path)
        assert {path.name for path in downloaded} >= {"model.safetensors"}
        left = s3.files.find(f"bucket/results/jobs/{job.id}", refresh=True)
        assert any(path.endswith("manifest.json") for path in left)
        client.delete(again.id)
        client.delete(job.id)
    assert s3.files.find(f"bucket/results/jobs/{job.id}", refresh=True) == []


def broken_sets(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Data that each lack something else, and what is to be said of them."""
    table = {"recipe": "tabular_classification"}
    texts = {
        "empty.csv": ("", "empty.csv: is an empty file"),
        "ragged.csv": ("x,y\n1,a\n2\n", "ragged.csv, line 3: has 1 fields, but the header has 2"),
        "target.csv": ("x,z\n1,a\n", "target.csv: data.target: there is no column 'y'"),
        "class.csv": ("x,y\n1,a\n2,a\n", "class.csv: the target 'y' has only one class, 'a'"),
        "nan.csv": ("x,y\n1,a\nNaN,b\n", "nan.csv, line 3: the column 'x' has no value"),
    }
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for name, (text, fault) in texts.items():
        (folder / name).write_text(text)
        source = (folder / name).as_uri()
        found[name] = ({**table, "data": {"source": source, "target": "y"}}, fault)
    for number, cut in enumerate((None, -30)):
        path = folder / "images" / str(number) / "1.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(_noise()[:cut])
    images = {"recipe": "image_classification", "data": {"source": (folder / "images").as_uri()}}
    found["images"] = (images, "images/1/1.png: is a damaged or truncated image")
    missing = {**table, "data": {"source": "file:///nowhere/t.csv", "target": "y"}}
    found["missing"] = (missing, "this file or folder does not exist on this node")
    return found


def _noise() -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


@SOAK
@pytest.mark.ray
def test_each_fault_of_the_data_fails_the_job_with_a_sentence(
    supplied: Service, tmp_path: Path
) -> None:
    with supplied.client as client:
        jobs = {
            name: (client.submit(document).id, fault)
            for name, (document, fault) in broken_sets(tmp_path).items()
        }
        for name, (job_id, fault) in jobs.items():
            job = client.wait(job_id, timeout_s=90)
            assert (job.state, job.reason.code) == (JobState.FAILED, "bad_data"), name
            assert fault in job.reason.message, name
            assert job.attempt == 1, "trying again would not help"


SAVES_BY_PATH = """\
import os, pathlib, signal, time

saved = pathlib.Path(os.environ["DRAY_CHECKPOINT_DIR"], "runs", "step")
done = int(saved.read_text()) if saved.exists() else 0
print(f"begins after step {done}", flush=True)
for step in range(done + 1, 41):
    saved.parent.mkdir(exist_ok=True)
    saved.with_suffix(".partial").write_text(str(step))
    saved.with_suffix(".partial").rename(saved)
    if step == 20 and done == 0:
        signal.pause()  # until it is killed
result = pathlib.Path(os.environ["DRAY_OUTPUT_DIR"], "deep", "result.txt")
result.parent.mkdir()
result.write_text(f"{done} and {step}")
"""


@SOAK
@pytest.mark.ray
def test_a_script_that_saves_by_path_goes_on_from_its_copy_on_s3(
    supplied: Service, s3: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SAVES_BY_PATH)
    with supplied.client as client:
        code = client.upload_code(tmp_path / "code").id
        script = {"code": code, "entrypoint": "train.py"}
        job_id = client.submit({"script": script, "max_retries": 1}).id
        copied = f"bucket/results/jobs/{job_id}/"

        def is_copied() -> bool:
            names = s3.files.find(copied, refresh=True)
            return any(
                name.endswith("/runs/step") and s3.files.cat(name) == b"20" for name in names
            )

        eventually(is_copied, within_s=90, why="the folder is not copied")
        os.kill(training_pids(job_id)[0], signal.SIGKILL)
        job = client.wait(job_id, timeout_s=90)
        log = [line.text for line in client.logs(job_id)]
        assert (job.state, job.attempt) == (JobState.SUCCEEDED, 2), (job.reason, log)
        assert log == ["begins after step 0", "begins after step 20"]
        client.download(job_id, tmp_path / "kept")
        assert (tmp_path / "kept" / "deep" / "result.txt").read_text() == "20 and 40"
        client.delete(job_id)
        eventually(lambda: not s3.files.find(copied, refresh=True), why="its files stay")


@SOAK
@pytest.mark.ray
def test_broken_data_end_the_job_at_once_and_no_secret_gets_out(
    supplied: Service, s3: ObjectStore
) -> None:
    """Not in the job, its events, its log, the database or the service's own log."""
    s3.put("broken.npz", b"no arrays")
    spec = {
        "recipe": "image_classification",
        "data": {"source": "s3://bucket/broken.npz", "credentials": "lab"},
        "max_retries": 3,
    }
    with supplied.client as client:
        job = client.wait(client.submit(spec).id, timeout_s=60)
        assert (job.state, job.reason.code) == (JobState.FAILED, "bad_data")
        assert "s3://bucket/broken.npz: is not an npz file, or is incomplete" in job.reason.message
        assert job.attempt == 1, "trying again would not help"
        told = everything_told(client, job.id) + supplied.log()
    stored = b"".join(
        path.read_bytes()
        for path in supplied.home.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    assert "broken.npz" in told
    for secret in (s3.key, s3.secret):
        assert secret not in told
        assert secret.encode() not in stored


def everything_told(client: Client, job_id: str) -> str:
    parts: list[Any] = [client.get(job_id), *client.follow(job_id)]
    return "".join(part.model_dump_json() for part in parts) + "".join(
        line.text for line in client.logs(job_id)
    )


def test_the_page_names_every_option_scheme_and_format() -> None:
    told = set(re.findall(r"data\.(\w+)", PAGE))
    assert set(Data.model_fields) - {"source", "validation_fraction"} <= told
    formats = {name for one in get_args(Data.model_fields["format"].annotation)
               for name in get_args(one)}  # fmt: skip
    (table,) = (part for part in PAGE.split("\n\n") if part.startswith("| `data.format` |"))
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == formats


def test_the_documents_cover_every_format() -> None:
    found = {Data(**yaml.safe_load(path.read_text())["data"]).known_format for path in EXAMPLES}
    assert {"csv", "parquet", "npz", "images"} <= found
