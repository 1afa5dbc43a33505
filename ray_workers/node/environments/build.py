"""Builds an environment with `uv`, in a folder that overlays the node's own packages.

uv resolves a job's requirements against the node's packages. Packages of the node that satisfy the
requirements are used; all other packages are installed into the environment's folder. If several
processes on a machine request the same environment, a lock ensures that only one of them builds it.
The lock only saves work, so a process doesn't wait forever for a lock holder that makes no
progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets as random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ray_workers.node.environments import programs
from ray_workers.node.environments.uv import (
    INSTALLED,
    installed,
    is_setting,
    names_source,
    sentence_of,
    state_of,
    uv_program,
)
from ray_workers.node.rank_environment import of_ranks
from ray_workers.node.shared_work import Abandoned, NotDone
from ray_workers.shared.folders.environment_overlay import (
    OWN_PACKAGES,
    EnvironmentRecord,
    find,
    is_private,
    modules_in,
    write_record,
)
from ray_workers.shared.folders.removal import remove_tree
from ray_workers.shared.node_needs import BuildState, EnvironmentPolicy
from ray_workers.shared.paths import own_folder
from ray_workers.shared.secret_files import Masker, read_secrets

MOST_TRIES = 3
"""Maximum number of tries to build an environment whose setup command is killed."""
SIZE_PERIOD_S = 1.0
"""Interval at which the size of a folder is measured while a program writes to it."""
CACHE = ".cache"
LOG_CHARS = 8000
"""Number of characters at the end of the log that a node includes in its response."""


@dataclass
class Build:
    """Tries once to build an environment. The methods block."""

    root: Path
    key: str
    environment: Mapping[str, Any]
    policy: EnvironmentPolicy
    is_wanted: Callable[[], bool]
    """Returns whether a job still needs the environment. Called repeatedly, from the build's
    thread."""
    keeps_all: bool

    def run(self) -> None:
        """Build the environment, unless another process does so first. Raises NotDone, OSError, or
        Abandoned if no job needs the environment."""
        own_folder(self.root)
        self._deadline = time.monotonic() + self.policy.build_limit_s
        self._size_due = 0.0
        self._cached_bytes: int | None = None
        with self._lock():
            if find(self.root, self.key) is not None:
                return
            folder = self.root / f"{self.key}-{random.token_hex(4)}"
            folder.mkdir(mode=0o700)
            log = folder / "log"
            try:
                packages = self._fill(folder, log)
                site = folder / "site"
                record = EnvironmentRecord(folder.name, packages, modules_in(site), size_of(site))
                write_record(self.root, self.key, record)
                failed_log(self.root, self.key).unlink(missing_ok=True)
            except BaseException:
                with contextlib.suppress(OSError):
                    log.replace(failed_log(self.root, self.key))
                remove_tree(folder)
                raise

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of this key, which is released when the process exits. If another process
        still holds the lock after half of the build limit, continue without the lock, because that
        process may be suspended."""
        with (self.root / f".lock-{self.key}").open("w") as lock:
            patience = time.monotonic() + self.policy.build_limit_s / 2
            while time.monotonic() < patience:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if find(self.root, self.key) is not None:
                        break
                    self._check_wanted()
                    time.sleep(0.1)
            yield

    def _fill(self, folder: Path, log: Path) -> tuple[str, ...]:
        site = folder / "site"
        site.mkdir(mode=0o700)
        packages: list[str] = []
        requirements = self._requirements()
        if requirements.strip():
            (folder / "requirements.txt").write_text(requirements)
            found = self._resolve(folder, log)
            packages = [name for name, _ in found]
            if found:
                wanted = [source for _, source in found]
                options = [line for line in requirements.splitlines() if names_source(line)]
                (folder / "install.txt").write_text("\n".join([*options, *wanted]) + "\n")
                target = ["install", "--no-deps", "--target", "site", "--requirements"]
                self._uv([*target, "install.txt"], folder, log)
        for command in self.environment.get("setup") or ():
            self._set_up(command, folder, log)
        return tuple(packages)

    def _requirements(self) -> str:
        packages = self.environment.get("python_packages") or ()
        return self.environment.get("requirements") or "".join(f"{one}\n" for one in packages)

    def _resolve(self, folder: Path, log: Path) -> list[tuple[str, str]]:
        """Return (`name==version`, requirement) for each package that the node doesn't have in a
        suitable version."""
        command = ["install", "--dry-run", "--requirements", "requirements.txt"]
        if self.keeps_all:
            kept = [f"{name}=={version}" for name, version in installed()]
            (folder / "constraints.txt").write_text("\n".join(kept) + "\n")
            command += ["--constraints", "constraints.txt"]
        found = []
        for line in self._uv(command, folder, log).splitlines():
            if (match := INSTALLED.match(line)) is None:
                continue
            name, version, url = match.group("name", "version", "url")
            if name.lower().replace("_", "-") not in OWN_PACKAGES:
                exact = f"{name}=={version}"
                found.append((exact, f"{name} @ {url}" if url else exact))
        return found

    def _uv(self, arguments: Sequence[str], folder: Path, log: Path) -> str:
        command = [uv_program(), "pip", *arguments, "--python", sys.executable]
        code, output = self._run(command, folder, log, self._uv_environment())
        if code == 0:
            return output
        if code < 0:  # the kernel kills programs when memory is short
            raise NotDone(f"uv was killed by signal {-code}", BuildState.UNREACHABLE)
        sentence = sentence_of(output) or f"uv exited with code {code}"
        raise NotDone(sentence, state_of(output))

    def _uv_environment(self) -> dict[str, str]:
        """Return the operator's settings for uv, and the job's own index."""
        own = {name: value for name, value in os.environ.items() if is_setting(name)}
        found = {
            **of_ranks(os.environ),
            **own,
            "UV_CACHE_DIR": str(self.root / CACHE),
            "UV_NO_PROGRESS": "1",
            "NO_COLOR": "1",
        }
        if is_private(self.environment, self.policy):
            found["UV_NO_CACHE"] = (
                "1"  # otherwise, other owners would get this index's packages from the cache
            )
        index = self.environment.get("index")
        if index:
            found["UV_INDEX"] = " ".join(filter(None, [f"job={index['url']}", own.get("UV_INDEX")]))
            if index.get("secret"):
                name, password = self._credentials(index["secret"])
                found |= {"UV_INDEX_JOB_USERNAME": name, "UV_INDEX_JOB_PASSWORD": password}
        return found

    def _credentials(self, secret: str) -> tuple[str, str]:
        value = read_secrets(self.policy.secrets_dir, [secret], self.policy.owner)[secret]
        name, colon, password = value.partition(":")
        return (name, password) if colon else ("__token__", value)

    def _set_up(self, command: str, folder: Path, log: Path) -> None:
        site = folder / "site"
        found = of_ranks(os.environ)
        path = os.pathsep.join(filter(None, [str(site), found.get("PYTHONPATH")]))
        programs = [str(site / "bin"), str(Path(sys.executable).parent), found.get("PATH", "")]
        found |= {"PYTHONPATH": path, "PATH": os.pathsep.join(programs)}
        append(log, f"$ {command}")
        code, output = self._run(["/bin/sh", "-c", command], site, log, found)
        if code != 0:
            was_killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)  # for lack of memory
            last = output.strip().splitlines()[-1:] or [""]
            shown = command if len(command) <= 200 else f"{command[:200]}..."
            how = f"exited with code {code}" if code > 0 else f"was killed by signal {-code}"
            sentence = f"the setup command {shown!r} {how}: {last[0][:500]}".rstrip(": ")
            raise NotDone(sentence, most_tries=MOST_TRIES if was_killed else 1)

    def _run(
        self, command: Sequence[str], cwd: Path, log: Path, environment: Mapping[str, str]
    ) -> tuple[int, str]:
        """Run a program and append its output to the log. Returns the exit code and the masked
        output."""
        masker = Masker(self._index_secret(environment))
        output, mark = programs.Output(), programs.mark_of(log.parent)

        fills_cache = "UV_CACHE_DIR" in environment and "UV_NO_CACHE" not in environment

        def check() -> None:
            self._check_wanted()
            self._check_time()
            if time.monotonic() >= self._size_due:
                self._check_size(log.parent, fills_cache=fills_cache)

        try:
            code = programs.run(command, cwd, environment, mark, output, check)
        finally:
            text = output.text(masker)
            append(log, text)
        self._check_size(log.parent)
        return code, text

    def _check_wanted(self) -> None:
        if not self.is_wanted():
            raise Abandoned

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise NotDone(
                f"the build did not finish within {self.policy.build_limit_s:g} s "
                "(DRAY_ENVIRONMENT_BUILD_LIMIT_S)"
            )

    def _cache_growth(self) -> int:
        """Return the number of bytes by which the installer's cache has grown since this build
        first measured it. Packages are linked from this cache."""
        size = size_of(self.root / CACHE)
        if self._cached_bytes is None:
            self._cached_bytes = size
        return size - self._cached_bytes

    def _check_size(self, folder: Path, *, fills_cache: bool = False) -> None:
        """Check the size limit, and schedule the next check. The longer a check takes, the longer
        the pause before the next check."""
        begun = time.monotonic()
        limit = self.policy.limit_bytes
        if fills_cache and self._cache_growth() > limit:
            raise NotDone(
                f"the packages that are being installed on this node need more than {limit} "
                "bytes, the limit for all environments of a node (DRAY_ENVIRONMENT_LIMIT_BYTES)",
                BuildState.UNREACHABLE,  # they may belong to a concurrent build
            )
        if size_of(folder) > limit:
            raise NotDone(
                f"the environment needs more than {limit} bytes, the limit for all environments "
                "of a node (DRAY_ENVIRONMENT_LIMIT_BYTES)"
            )
        self._size_due = time.monotonic() + SIZE_PERIOD_S + 20 * (time.monotonic() - begun)

    def _index_secret(self, environment: Mapping[str, str]) -> dict[str, str]:
        name = "UV_INDEX_JOB_PASSWORD"
        return {name: environment[name]} if name in environment else {}


def failed_log(root: Path, key: str) -> Path:
    return root / f"{key}.log"


def log_of(root: Path, key: str) -> str:
    return tail(failed_log(root, key))


def tail(path: Path, most: int = LOG_CHARS) -> str:
    try:
        with open(path, "rb", opener=open_at_once) as file:
            return end_of(file, most)
    except OSError:
        return ""


def end_of(file: BinaryIO, most: int) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - most))
    return file.read().decode(errors="replace").strip()


def append(log: Path, text: str) -> None:
    """Append a line. Does nothing if a setup command has replaced the log with something other than
    a file."""
    with contextlib.suppress(OSError), open(log, "a", opener=open_at_once) as file:
        file.write(f"{text}\n")


def open_at_once(path: str, flags: int) -> int:
    """Open a file without following links, and without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def size_of(folder: Path) -> int:
    """Return the total size of the files below a folder, in bytes. Files may be removed during the
    call."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(parent, name).lstat().st_size
    return total
