"""The error for a missing module contains advice on how to provide it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from ray_workers.training.core.failure_reason import advised

PACKAGE = "If timm_of_mine is a package, add it to environment.python_packages or to the file "
PACKAGE += "passed to --requirements; "


def failed_to_import(name: str) -> ModuleNotFoundError:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(name)
    return caught.value


def test_a_package_may_be_installed_and_a_file_be_uploaded() -> None:
    error = failed_to_import("timm_of_mine.models")
    upload = "if the module is in one of your files, upload its folder: `dray submit --code FOLDER`"
    assert advised("said", error, has_code=False, max_chars=1000) == f"said. {PACKAGE}{upload}"
    packed = "one of your files was not uploaded: `dray submit --dry-run` lists the uploaded files"
    assert advised("said", error, has_code=True, max_chars=1000) == f"said. {PACKAGE}{packed}"
    cause = RuntimeError("no model")
    cause.__cause__ = error
    assert PACKAGE in advised("said", cause, has_code=True, max_chars=1000)


def test_a_file_that_lacks_in_a_package_of_the_jobs_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    error = failed_to_import("my_pkg.data")
    said = advised("said", error, has_code=True, max_chars=1000)
    packed = "One of your files was not uploaded: `dray submit --dry-run` lists the uploaded files"
    assert said == f"said. {packed}"
    sys.modules.pop("my_pkg")


def test_other_errors_stay_as_they_are() -> None:
    of_its_own = ModuleNotFoundError("mpi4py is not supported", name="mpi4py")
    in_a_library = failed_to_import("json.no_such_part")
    for error in (ValueError("x"), of_its_own, in_a_library):
        assert advised("said", error, has_code=True, max_chars=1000) == "said"


def test_the_advice_stays_whole() -> None:
    error = failed_to_import("timm_of_mine")
    said = advised("x" * 2000, error, has_code=True, max_chars=2000)
    assert len(said) == 2000
    assert said.endswith("lists the uploaded files")
