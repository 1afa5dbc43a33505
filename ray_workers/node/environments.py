"""Builds environments on a node: by `uv`, into folders that lie over the node's own packages.

uv resolves what a job asks for against the packages that the node has, so that these stay wherever
they fit, and only those that differ are installed, into a folder of the environment. Several
processes of a machine may ask for one environment: a lock has one of them build it. The lock only
saves work, and a process that holds it and stands still is not waited for without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets as random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ray_workers.node.rank_environment import of_ranks
from ray_workers.shared.contracts import BuildState, EnvironmentPolicy, NodeEnvironment
from ray_workers.shared.environment_overlay import (
    OWN_PACKAGES,
    EnvironmentRecord,
    environments_dir,
    find,
    key_of,
    modules_in,
    read_record,
    write_record,
)
from ray_workers.shared.paths import entries, own_folder
from ray_workers.shared.procfs import started_ticks
from ray_workers.shared.secret_files import Masker, SecretUnavailable, read_secrets

LOG_CHARS = 8000
"""The end of the log that a node's answer holds."""
OUTPUT_CHARS = 4 << 20
"""The end of what one program prints that is kept."""
CACHE, PID = ".cache", ".pid"
BUILDS_AT_A_TIME = 2
FIRST_ANSWER_S = 2.0
"""How long a question waits for a build that is under way: most are over by then."""
FAILURE_KEPT_S = 10.0
"""How long a failed build is answered from memory before another try."""
RETRY_PAUSES_S = (2.0, 5.0, 15.0, 60.0)
"""Between tries of a build that met an index or a disk at fault."""
IDLE_S = 600.0
"""An environment that was used so lately is not removed: its ranks may be about to start."""
_UNREACHABLE = re.compile(
    r"error sending request|Failed to fetch|Request failed after|client error|dns error"
    r"|timed out|Connection (refused|reset)|status server error|No space left on device"
    r"|5\d\d (Internal|Bad Gateway|Service|Gateway)",
    re.IGNORECASE,
)
_REFUSED = re.compile(r"HTTP status client error|401 Unauthorized|403 Forbidden|404 Not Found")
_INSTALLED = re.compile(r"^ \+ (?P<name>[^=@\s]+)==(?P<version>\S+)(?: \(from (?P<url>.+)\))?$")


class BuildFailed(Exception):
    """The installer or a setup command failed; `state` says whether another try may help."""

    def __init__(self, message: str, state: BuildState = BuildState.FAILED) -> None:
        super().__init__(message)
        self.state = state


class Environments:
    """The environments of one node. For one event loop; builds run in threads."""

    def __init__(self, preloaded: Path, root: Path | None = None) -> None:
        """preloaded: the file in which the forkserver names the modules that it has imported."""
        self._preloaded = preloaded
        self._root = root
        self._builds: dict[str, asyncio.Task[BuildFailed | None]] = {}
        self._failed: dict[str, tuple[BuildFailed, float]] = {}
        """The last failure of a key, and when another try may begin, by `time.monotonic`."""
        self._tries: dict[str, int] = {}
        self._clearing: asyncio.Future[None] | None = None
        self._building = asyncio.Semaphore(BUILDS_AT_A_TIME)

    async def prepare(
        self, environment: Mapping[str, Any], policy: EnvironmentPolicy, *, keeps_all: bool
    ) -> NodeEnvironment:
        """How far the node is with this environment; begins to build it if nobody has. Harmless
        to repeat.

        keeps_all: none of the node's packages may be replaced, as for a recipe.
        """
        try:
            await asyncio.to_thread(_check_secrets, environment, policy)
        except SecretUnavailable as error:
            return _answer(BuildState.FAILED, str(error))
        if not is_built(environment):
            return _answer(BuildState.READY, "")
        root = self._root or environments_dir()
        key = key_of(environment, keeps_all=keeps_all)
        record = await asyncio.to_thread(find, root, key)
        if record is not None:
            return self._ready(root, record)
        failure, due = self._failed.get(key, (None, 0.0))
        if failure is not None and time.monotonic() < due:
            return self._failure(root, key, failure)
        if key not in self._builds:
            build = Build(root, key, environment, policy, keeps_all=keeps_all)
            self._builds[key] = asyncio.ensure_future(self._run(build))
        task = self._builds[key]
        await asyncio.wait({task}, timeout=FIRST_ANSWER_S)
        if not task.done():
            return _answer(BuildState.BUILDING, "installs packages", log=_log_of(root, key))
        failure = task.result()
        if failure is not None:
            return self._failure(root, key, failure)
        record = await asyncio.to_thread(find, root, key)
        if record is None:
            return _answer(BuildState.UNREACHABLE, "it was removed again at once")
        return self._ready(root, record)

    async def _run(self, build: Build) -> BuildFailed | None:
        try:
            async with self._building:
                await asyncio.to_thread(build.run)
        except BuildFailed as error:
            failure = error
        except Exception as error:  # a full disk, a folder of another user
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            failure = BuildFailed(message, BuildState.UNREACHABLE)
        else:
            self._failed.pop(build.key, None)
            self._tries.pop(build.key, None)
            return None
        finally:
            self._builds.pop(build.key, None)
            self._clearing = asyncio.ensure_future(
                asyncio.to_thread(make_room, build.root, build.policy.limit_bytes)
            )
        tries = self._tries[build.key] = self._tries.get(build.key, 0) + 1
        is_final = failure.state is BuildState.FAILED
        last = len(RETRY_PAUSES_S)
        pause_s = FAILURE_KEPT_S if is_final else RETRY_PAUSES_S[min(tries, last) - 1]
        self._failed[build.key] = (failure, time.monotonic() + pause_s)
        return failure

    def _ready(self, root: Path, record: EnvironmentRecord) -> NodeEnvironment:
        try:
            preloaded = set(self._preloaded.read_text().split())
        except OSError:
            preloaded = set()
        return NodeEnvironment(
            BuildState.READY,
            "",
            record.packages,
            replaced=tuple(sorted(preloaded & set(record.modules))),
            log=_tail(root / record.folder / "log"),
        )

    def _failure(self, root: Path, key: str, failure: BuildFailed) -> NodeEnvironment:
        return _answer(failure.state, str(failure), log=_log_of(root, key))


def is_built(environment: Mapping[str, Any]) -> bool:
    """`dray.spec.Environment.is_built`, of the document as JSON data."""
    text = environment.get("requirements") or ""
    return bool(environment.get("python_packages") or text.strip() or environment.get("setup"))


def _check_secrets(environment: Mapping[str, Any], policy: EnvironmentPolicy) -> None:
    names = list(environment.get("secrets") or ())
    index = environment.get("index") or {}
    if index.get("secret"):
        names.append(index["secret"])
    read_secrets(policy.secrets_dir, names)


def _answer(state: BuildState, message: str, log: str = "") -> NodeEnvironment:
    return NodeEnvironment(state, message, packages=(), replaced=(), log=log)


def _failed_log(root: Path, key: str) -> Path:
    return root / f"{key}.log"


def _log_of(root: Path, key: str) -> str:
    return _tail(_failed_log(root, key))


def _tail(path: Path, most: int = LOG_CHARS) -> str:
    try:
        with open(path, "rb", opener=_at_once) as file:
            return _end_of(file, most)
    except OSError:
        return ""


def _end_of(file: BinaryIO, most: int) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - most))
    return file.read().decode(errors="replace").strip()


def _append(log: Path, text: str) -> None:
    """Add a line; nothing if a setup command has put something else in the log's place."""
    with contextlib.suppress(OSError), open(log, "a", opener=_at_once) as file:
        file.write(f"{text}\n")


def _at_once(path: str, flags: int) -> int:
    """An opener that follows no link, and waits for nobody at the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


@dataclass
class Build:
    """One try to build an environment. Blocking."""

    root: Path
    key: str
    environment: Mapping[str, Any]
    policy: EnvironmentPolicy
    keeps_all: bool

    def run(self) -> None:
        """Build it unless another process does so first. BuildFailed, or OSError."""
        own_folder(self.root)
        self._deadline = time.monotonic() + self.policy.build_limit_s
        with self._lock():
            if find(self.root, self.key) is not None:
                return
            folder = self.root / f"{self.key}-{random.token_hex(4)}"
            folder.mkdir(mode=0o700)
            log = folder / "log"
            try:
                packages = self._fill(folder, log)
                site = folder / "site"
                record = EnvironmentRecord(folder.name, packages, modules_in(site), _size(site))
                write_record(self.root, self.key, record)
                _failed_log(self.root, self.key).unlink(missing_ok=True)
            except BaseException:
                with contextlib.suppress(OSError):
                    log.replace(_failed_log(self.root, self.key))
                shutil.rmtree(folder, ignore_errors=True)
                raise

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Alone with this key, or after half of the limit together with a process that stands
        still; the lock goes with the process that holds it."""
        with (self.root / f".lock-{self.key}").open("w") as lock:
            patience = time.monotonic() + self.policy.build_limit_s / 2
            while time.monotonic() < patience:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if find(self.root, self.key) is not None:
                        break
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
                options = [line for line in requirements.splitlines() if _is_place(line)]
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
        """(`name==version`, what to install) of each package that the node has not in a version
        that fits."""
        command = ["install", "--dry-run", "--requirements", "requirements.txt"]
        if self.keeps_all:
            kept = [f"{name}=={version}" for name, version in _installed()]
            (folder / "constraints.txt").write_text("\n".join(kept) + "\n")
            command += ["--constraints", "constraints.txt"]
        found = []
        for line in self._uv(command, folder, log).splitlines():
            if (match := _INSTALLED.match(line)) is None:
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
        sentence = sentence_of(output) or f"uv ended with code {code}"
        raise BuildFailed(sentence, state_of(output))

    def _uv_environment(self) -> dict[str, str]:
        """The operator's settings of uv, and the job's own index."""
        own = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
        found = {
            **of_ranks(os.environ),
            "UV_CACHE_DIR": str(self.root / CACHE),
            **own,
            "UV_NO_PROGRESS": "1",
            "NO_COLOR": "1",
        }
        index = self.environment.get("index")
        if index:
            found["UV_INDEX"] = " ".join(filter(None, [f"job={index['url']}", own.get("UV_INDEX")]))
            if index.get("secret"):
                name, password = self._credentials(index["secret"])
                found |= {"UV_INDEX_JOB_USERNAME": name, "UV_INDEX_JOB_PASSWORD": password}
        return found

    def _credentials(self, secret: str) -> tuple[str, str]:
        value = read_secrets(self.policy.secrets_dir, [secret])[secret]
        name, colon, password = value.partition(":")
        return (name, password) if colon else ("__token__", value)

    def _set_up(self, command: str, folder: Path, log: Path) -> None:
        site = folder / "site"
        found = of_ranks(os.environ)
        path = os.pathsep.join(filter(None, [str(site), found.get("PYTHONPATH")]))
        programs = [str(site / "bin"), str(Path(sys.executable).parent), found.get("PATH", "")]
        found |= {"PYTHONPATH": path, "PATH": os.pathsep.join(programs)}
        _append(log, f"$ {command}")
        code, output = self._run(["/bin/sh", "-c", command], site, log, found)
        if code != 0:
            last = output.strip().splitlines()[-1:] or [""]
            shown = command if len(command) <= 200 else f"{command[:200]}..."
            how = f"ended with code {code}" if code > 0 else f"was killed by signal {-code}"
            raise BuildFailed(f"the setup command {shown!r} {how}: {last[0][:500]}".rstrip(": "))

    def _run(
        self, command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]
    ) -> tuple[int, str]:
        """Exit code and output of a program, which is in the log, too; without secrets."""
        masker = Masker(self._index_secret(environment))
        place = log.parent
        out = place / ".output"
        out.unlink(missing_ok=True)
        # Read by its descriptor: a setup command may put something else in the file's place.
        with open(out, "w+b", opener=_at_once) as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                (place / PID).unlink(missing_ok=True)
                (place / PID).write_text(f"{process.pid} {started_ticks(process.pid)}")
                code = process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise BuildFailed(
                    f"it was not built within {self.policy.build_limit_s:g} s "
                    "(DRAY_ENVIRONMENT_BUILD_LIMIT_S)"
                ) from None
            finally:
                # Also what it left behind, so that nothing writes to the folder any more.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                text = masker.text(_end_of(output, OUTPUT_CHARS))
                out.unlink(missing_ok=True)
                _append(log, text)
        return code, text

    def _index_secret(self, environment: Mapping[str, str]) -> dict[str, str]:
        name = "UV_INDEX_JOB_PASSWORD"
        return {name: environment[name]} if name in environment else {}


def uv_program() -> str:
    """The path of uv's program. BuildFailed if it is not installed."""
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        raise BuildFailed(
            "uv, which installs packages, is missing on this node: pip install 'dray[worker]'",
            BuildState.UNREACHABLE,
        ) from None


def _installed() -> list[tuple[str, str]]:
    from importlib.metadata import distributions

    found = {each.metadata["Name"]: each.version for each in distributions()}
    return sorted((name, version) for name, version in found.items() if name)


def _is_place(line: str) -> bool:
    """Whether a line of requirements says where packages come from."""
    return line.lstrip().startswith(
        ("--index-url", "-i", "--extra-index-url", "--find-links", "-f ", "--no-index", "--pre")
    )


def sentence_of(output: str) -> str:
    """uv's own words on why it failed: the error and its causes, in one line."""
    lines = [re.sub(r"^\W*(cause:)?\s*", "", line) for line in output.splitlines()]
    first = next((n for n, line in enumerate(lines) if line.startswith(("error", "Failed"))), None)
    if first is None:
        return next((line for line in reversed(lines) if line), "")
    words = filter(None, lines[first:])
    return ": ".join(words).removeprefix("error: ")[:2000]


def state_of(output: str) -> BuildState:
    """Whether the same requirements may be installed another time."""
    if _REFUSED.search(output) or not _UNREACHABLE.search(output):
        return BuildState.FAILED
    return BuildState.UNREACHABLE


def make_room(root: Path, limit_bytes: int) -> None:
    """Remove what builders that died left, and beyond the limit the environments that were used
    longest ago, and the installer's cache. Those in use stay. Blocking."""
    kept: dict[Path, EnvironmentRecord] = {}
    for path in entries(root):
        if path.suffix != ".json":
            continue
        if (record := read_record(path)) is None:
            path.unlink(missing_ok=True)
        else:
            kept[path] = record
    folders = {record.folder for record in kept.values()}
    for path in entries(root):
        if path.is_dir() and not path.name.startswith(".") and path.name not in folders:
            _remove_unfinished(root, path)
    total = _size(root / CACHE)
    for path, record in sorted(kept.items(), key=lambda item: _used_at(item[0]), reverse=True):
        total += record.size_bytes
        is_old = time.time() - _used_at(path) > IDLE_S
        if total > limit_bytes and is_old and _remove(root, path, record):
            total -= record.size_bytes
    if total > limit_bytes:
        with contextlib.suppress(BuildFailed, OSError, subprocess.SubprocessError):
            command = [uv_program(), "cache", "clean", "--cache-dir", str(root / CACHE)]
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60.0)


def _remove_unfinished(root: Path, folder: Path) -> None:
    """Remove a folder whose builder is gone, and end what that has started."""
    with (root / f".lock-{folder.name.split('-')[0]}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        with contextlib.suppress(OSError, ValueError):
            pid, started = map(int, (folder / PID).read_text().split())
            if started_ticks(pid) == started:
                os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _remove(root: Path, path: Path, record: EnvironmentRecord) -> bool:
    """Remove an environment; False if ranks have it in use."""
    folder = root / record.folder
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        path.unlink(missing_ok=True)  # first: half of a folder must not be found
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(lock)


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(folder: Path) -> int:
    """Bytes of the files below a folder, each counted once; files may go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total
