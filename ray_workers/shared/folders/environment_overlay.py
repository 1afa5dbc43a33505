"""Environments on a node, which are folders of packages that overlay the node's own packages.

    environments/KEY.json     description of the environment, once it is finished
    environments/FOLDER/site  its packages, which precede the node's own (PYTHONPATH)
    environments/FOLDER/log   the output of the installer and of the setup commands

The description is written last and atomically, so a builder that dies leaves no unfinished
environment behind. While a rank runs, it holds a shared lock on the folder of its environment, so
that the folder is not removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import platform
import site
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dray
from ray_workers.shared.node_needs import EnvironmentPolicy
from ray_workers.shared.paths import machine_root
from ray_workers.shared.secret_files import is_owners

_DECIDING = ("python_packages", "requirements", "index", "setup")
"""Fields of `environment` that determine what is installed."""
OWN_PACKAGES = frozenset({"dray", "ray_workers"})


@dataclass(frozen=True)
class EnvironmentRecord:
    """The description of a finished environment."""

    folder: str
    packages: tuple[str, ...]
    """`name==version` of the packages that differ from the node's own."""
    modules: tuple[str, ...]
    """Names of the top-level modules of these packages."""
    size_bytes: int


def environments_dir() -> Path:
    """Return the folder for the environments of all of this user's deployments on this machine."""
    return machine_root() / "environments"


def key_of(
    environment: Mapping[str, Any], policy: EnvironmentPolicy | None = None, *, keeps_all: bool
) -> str:
    """Return the name of an environment on this node: a hash of the request, the interpreter, the
    node's own distributions and dray's version. `keeps_all` means that no package of the node may
    be replaced.

    The environment is shared by all owners unless its package index requires the secret of one
    owner.
    """
    described = {
        **{name: environment.get(name) or None for name in _DECIDING},
        "keeps_all": keeps_all,
        "owner": policy.owner if policy and is_private(environment, policy) else None,
        "python": [platform.python_version(), sys.executable, os.uname().machine],
        "distributions": sorted(distributions()),
        "dray": dray.__version__,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


def is_private(environment: Mapping[str, Any], policy: EnvironmentPolicy) -> bool:
    """Whether the environment's package index requires a secret that only this owner can use."""
    secret = (environment.get("index") or {}).get("secret")
    return secret is not None and is_owners(policy.secrets_dir, secret, policy.owner)


def distributions() -> list[str]:
    """Return the names and versions of the packages that are installed for this interpreter."""
    found = []
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        with contextlib.suppress(OSError):
            names = [path.name for path in Path(folder).iterdir()]
            found += [name for name in names if name.endswith((".dist-info", ".egg-info"))]
    return found


def find(root: Path, key: str) -> EnvironmentRecord | None:
    """Return the finished environment with this key, or None, and mark the environment as just
    used."""
    path = root / f"{key}.json"
    record = read_record(path)
    if record is None or not (root / record.folder / "site").is_dir():
        return None
    with contextlib.suppress(FileNotFoundError):
        os.utime(path)
    return record


def read_record(path: Path) -> EnvironmentRecord | None:
    """Return the description in a file; None if the file is missing or incomplete."""
    try:
        data = json.loads(path.read_text())
        data["packages"], data["modules"] = tuple(data["packages"]), tuple(data["modules"])
        return EnvironmentRecord(**data)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_record(root: Path, key: str, record: EnvironmentRecord) -> None:
    partial = root / f"{record.folder}.json.partial"
    with partial.open("w") as file:
        json.dump(asdict(record), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(root / f"{key}.json")


def hold(root: Path, record: EnvironmentRecord) -> int:
    """Return a file descriptor that keeps the environment from being removed while any process has
    it open. Raises FileNotFoundError if the environment has just been removed."""
    lock = os.open(root / record.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    if not (root / record.folder / "site").is_dir():
        os.close(lock)
        raise FileNotFoundError(record.folder)
    return lock


def variables(root: Path, record: EnvironmentRecord, known: Mapping[str, str]) -> dict[str, str]:
    """Return the PYTHONPATH and PATH with which child processes also find the environment."""
    packages = root / record.folder / "site"
    path = [str(packages), *filter(None, [known.get("PYTHONPATH")])]
    programs = [str(packages / "bin"), *filter(None, [known.get("PATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "PATH": os.pathsep.join(programs)}


def replaced_in(modules: Mapping[str, Any], record: EnvironmentRecord) -> list[str]:
    """Return the environment's modules that have already been imported from elsewhere."""
    return sorted(name for name in record.modules if name in modules)


def enter(root: Path, record: EnvironmentRecord) -> None:
    """Make this process import from the environment first, like an interpreter started with
    PYTHONPATH. The environment's `.pth` files also take effect."""
    packages = str(root / record.folder / "site")
    sys.path.insert(0, packages)
    site.addsitedir(packages)
    importlib.invalidate_caches()


def modules_in(packages: Path) -> tuple[str, ...]:
    """Return the names of the top-level modules in a folder of packages."""
    found = set()
    for entry in os.scandir(packages):
        name = entry.name
        if entry.is_dir() and "." not in name and name not in ("bin", "__pycache__"):
            found.add(name)
        elif name.endswith((".py", ".so")):
            found.add(name.split(".")[0])
    return tuple(sorted(found))
