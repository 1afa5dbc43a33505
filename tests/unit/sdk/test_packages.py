"""The packages that a program's folder lists."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path

import pytest

from dray.code.packages import (
    FoundPackages,
    PackagesUnreadable,
    find_packages,
    read_requirements,
)
from dray.spec import Environment

LOCK = """version = 1
requires-python = ">=3.11"

[[package]]
name = "einops"
version = "0.8.0"
source = { registry = "https://pypi.org/simple" }

[[package]]
name = "job"
version = "0.1.0"
source = { virtual = "." }
dependencies = [{ name = "einops" }, { name = "colorama", marker = "sys_platform == 'win32'" }]

[package.metadata]
requires-dist = [{ name = "einops" }, { name = "colorama", marker = "sys_platform == 'win32'" }]

[[package]]
name = "colorama"
version = "0.4.6"
source = { registry = "https://pypi.org/simple" }
"""
PROJECT = """[project]
name = "job"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["einops", "colorama; sys_platform == 'win32'"]
"""


def found(folder: Path, **files: str) -> FoundPackages | None:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return find_packages(folder, {path.name for path in folder.iterdir()})


@pytest.mark.parametrize(
    "start",
    [
        (b"", "utf-8"),
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
    ids=lambda start: f"{start[0].hex()}-{start[1]}",
)
def test_a_byte_order_mark_is_no_part_of_a_requirement(
    tmp_path: Path, start: tuple[bytes, str]
) -> None:
    text = "einops>=0.8\n# Grüße\n"
    path = tmp_path / "requirements.txt"
    path.write_bytes(start[0] + text.encode(start[1]))
    assert read_requirements(path) == text
    assert Environment(requirements="\ufeff" + text).requirements == text


def test_the_first_file_that_lists_packages_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # uv is beside Python
    assert found(tmp_path, train_py="") is None
    listed = found(tmp_path, pyproject_toml=PROJECT)
    assert listed is not None
    assert (listed.source, listed.num_packages) == ("pyproject.toml", 2)
    listed = found(tmp_path, uv_lock=LOCK)
    assert listed is not None
    pins = ["colorama==0.4.6 ; sys_platform == 'win32'", "einops==0.8.0"]
    assert (listed.source, listed.lines) == ("uv.lock", pins)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    listed = found(tmp_path)
    assert listed is not None
    assert (listed.source, listed.num_packages) == ("pyproject.toml", 2)
    assert listed.without == "reading uv.lock requires uv, which is not installed"
    listed = found(tmp_path, requirements_txt="# none yet\n")
    assert listed is None
    listed = found(tmp_path, requirements_txt="--pre\ntorch\n\n# why\nnumpy>=2\n")
    assert listed is not None
    assert (listed.source, listed.num_packages) == ("requirements.txt", 2)
    assert find_packages(tmp_path, {"train.py"}) is None


POETRY = "[tool.poetry.dependencies]\npython = '^3.11'\n"


def test_packages_in_poetrys_own_form_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    assert found(tmp_path, pyproject_toml=POETRY) is None
    with pytest.raises(PackagesUnreadable, match=r"tool\.poetry\.dependencies"):
        found(tmp_path, pyproject_toml=POETRY + "einops = '^0.8'\n")
    listed = found(tmp_path, pyproject_toml=PROJECT + POETRY + "einops = {source = 'x'}\n")
    assert listed is not None
    assert listed.num_packages == 2
    with pytest.raises(PackagesUnreadable, match=r"project\.dynamic"):
        found(tmp_path, pyproject_toml="[project]\nname = 'a'\ndynamic = ['dependencies']\n")


def test_a_lock_that_nothing_here_reads_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(PackagesUnreadable, match="uv, which is not installed"):
        found(tmp_path, pyproject_toml="[project]\nname = 'a'\n", uv_lock=LOCK)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("[[tool.uv.index]]\nurl = 'https://x.org'\n", "tool.uv.index"),
        ("[tool.uv.sources]\neinops = { path = '../einops' }\n", "tool.uv.sources"),
        ("dependencies = 3", "can't be read"),
        ("[tool]\nuv = 3", "can't be read"),
    ],
)
def test_a_project_whose_packages_come_from_elsewhere_is_left_alone(
    tmp_path: Path, more: str, words: str
) -> None:
    with pytest.raises(PackagesUnreadable, match=words):
        found(tmp_path, pyproject_toml=PROJECT + more)
