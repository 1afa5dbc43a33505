"""The wheel of dray, built from the source archive: what is in it, and that it works where none of
the server's libraries are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import dray
from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.parallel.meta_init import materialise

ROOT = Path(__file__).resolve().parents[3]

SERVER_ONLY = (
    "alembic",
    "api",
    "fastapi",
    "fsspec",
    "numpy",
    "psycopg",
    "ray",
    "safetensors",
    "service",
    "sklearn",
    "sqlalchemy",
    "starlette",
    "torch",
    "torchmetrics",
)

PREDICT = ("fsspec", "numpy", "safetensors", "torch", "torchmetrics")
"""The libraries among them that the extra `predict` installs."""

# Stands in for an environment without those libraries: importing them fails as if they were not
# there. Python runs `sitecustomize` of the first folder on its path when it starts.
SITECUSTOMIZE = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {SERVER_ONLY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DRAY_", "PYTHON"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as by `make dist` from a copy of what the build reads, so that nothing is left in the
    checkout. The wheel is built from the source archive, which therefore has all that it needs."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("api", "dray", "ray_workers", "service", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    manual = source / "dray" / "_manual" / "guides"
    manual.mkdir(parents=True, exist_ok=True)
    (manual / "page.html").write_text("as `make docs` leaves it")
    built = run(sys.executable, "-m", "build", "--no-isolation", cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (source / "dist" / f"dray-{dray.__version__}.tar.gz").is_file()
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only the wheel, which comes first on the path."""
    target = tmp_path_factory.mktemp("installed")
    done = run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
        *("--target", target, wheel),
        cwd=target,
    )
    assert done.returncode == 0, done.stderr
    (target / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return target


def python(installed: Path, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", code, cwd=cwd, PYTHONPATH=str(installed))


def test_the_wheel_holds_the_client_and_the_engine_that_load_brings_in(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.partition("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"dray", "ray_workers"}
    for package in ("dray", "ray_workers"):
        modules = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert modules <= set(names), "a module is missing: its folder has no __init__.py"
    assert "dray/py.typed" in names
    assert "dray/_manual/guides/page.html" in names


def test_the_wheel_asks_for_nothing_of_the_servers(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    required = [
        line.removeprefix("Requires-Dist: ")
        for line in archive.read(metadata).decode().splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    names = {line.partition(">")[0].strip() for line in required}
    assert names == {"httpx", "pydantic", "pyyaml", "rich", "typer"}


@pytest.mark.parametrize("name", ["numpy", "ray", "torch"])
def test_the_servers_libraries_are_absent_in_these_tests(
    installed: Path, tmp_path: Path, name: str
) -> None:
    said = python(installed, f"import {name}", tmp_path)
    assert f"No module named '{name}'" in said.stderr


def test_every_module_of_the_wheel_imports_without_the_servers_libraries(
    installed: Path, tmp_path: Path
) -> None:
    said = python(
        installed,
        "import importlib, pkgutil, dray\n"
        "print(dray.__file__)\n"
        "for module in pkgutil.walk_packages(dray.__path__, 'dray.'):\n"
        "    # The model that `train.prepare` takes, and the tensors of a store, are torch's.\n"
        "    # Secure aggregation and arrays of media need numpy.\n"
        "    needs_more = module.name.startswith(('dray.train.prepared.', 'dray.train.kv'))\n"
        "    needs_more |= module.name == 'dray.media.arrays'\n"
        "    room, _, name = module.name.rpartition('.')\n"
        "    if room == 'dray.secure_aggregation':\n"
        "        needs_more = name in ('client', 'fixed_point', 'server')\n"
        "    if not module.name.endswith('__main__') and not needs_more:\n"
        "        importlib.import_module(module.name)\n"
        "for name in dray.__all__:\n"
        "    getattr(dray, name)\n",
        tmp_path,
    )
    assert said.returncode == 0, said.stderr
    assert Path(said.stdout.strip()).is_relative_to(installed)


def test_secure_aggregation_says_what_it_needs(installed: Path, tmp_path: Path) -> None:
    for half, missing in (("client", "numpy"), ("server", "cryptography")):
        hidden = f"import sys; sys.modules[{missing!r}] = None"
        said = python(installed, f"{hidden}; import dray.secure_aggregation.{half}", tmp_path)
        assert f"ImportError: secure aggregation requires the package {missing}" in said.stderr
        assert "pip install 'dray[client]'" in said.stderr


def test_a_document_is_checked_without_the_servers_libraries(
    installed: Path, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "examples" / "digits.yaml", tmp_path)
    said = python(
        installed,
        "import dray, pydantic\n"
        "spec = dray.load_spec('digits.yaml')\n"
        "print(spec.name, spec.resources.num_workers)\n"
        "try:\n"
        "    dray.JobSpec.model_validate({'recipe': 'image_classification', 'epochs': 3})\n"
        "except pydantic.ValidationError as error:\n"
        "    print(error.errors()[0]['loc'])\n",
        tmp_path,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines() == ["digits 2", "('epochs',)"]


def test_the_command_runs_and_says_when_there_is_no_server(installed: Path, tmp_path: Path) -> None:
    command = installed / "bin" / "dray"
    helped = run(sys.executable, command, "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    assert helped.returncode == 0, helped.stderr
    for name in ("submit", "ls", "logs", "cancel", "explain", "download"):
        assert f"\n  {name} " in helped.stdout
    alone = run(
        *(sys.executable, command, "get", "job-01m7yd3es5qx6amk0z86sedmn7"),
        cwd=tmp_path,
        PYTHONPATH=str(installed),
        DRAY_URL="http://127.0.0.1:1",
    )
    assert alone.returncode == 4, alone.stderr
    assert "http://127.0.0.1:1" in alone.stderr
    assert "Traceback" not in alone.stderr


def test_loading_a_model_says_what_it_needs(installed: Path, tmp_path: Path) -> None:
    said = python(installed, "import dray; dray.load('model')", tmp_path)
    assert "ImportError: dray.load needs the package" in said.stderr
    assert "pip install 'dray[predict]'" in said.stderr


def test_a_model_is_loaded_and_predicts_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    """With the packages of `dray[predict]`, but without Ray and the server's other packages."""
    target, result = tmp_path / "installed", tmp_path / "model"
    zipfile.ZipFile(wheel).extractall(target)
    present = (*PREDICT, "sklearn")  # torch looks whether there is a scikit-learn
    absent = tuple({*SERVER_ONLY, "pyarrow", "s3fs"} - {*present})
    (target / "sitecustomize.py").write_text(SITECUSTOMIZE.replace(repr(SERVER_ONLY), repr(absent)))
    result.mkdir()
    document = JobSpec.model_validate({"recipe": "image_classification", "model": {"name": "mlp"}})
    work = RECIPES["image_classification"].build(document, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), 0)
    work.write_results(work.model, {}, 1, result)
    code = (
        "import dray, numpy, ray_workers\n"
        "model = dray.load('model')\n"
        "print(model.predict_proba(numpy.zeros((8, 8), dtype=numpy.uint8)).shape)\n"
        "print(ray_workers.__file__)\n"
        "import ray_workers.training.clients.outside_client\n"  # of `dray[client]`, the same
    )
    said = python(target, code, tmp_path)
    assert said.returncode == 0, said.stderr
    shape, where = said.stdout.splitlines()
    assert shape == "(1, 10)"
    assert Path(where).is_relative_to(target)


def test_a_script_that_reports_runs_by_hand_without_the_servers_libraries(
    installed: Path, tmp_path: Path
) -> None:
    said = python(
        installed,
        "from dray import train\n"
        "train.report(1, {'train/loss': 0.5})\n"
        "print(train.context().world_size)\n",
        tmp_path,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == "1"
