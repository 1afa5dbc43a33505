"""Fetches the files of one commit of a Git repository, without a checkout.

Git only fetches the commit's objects. The files are then read from the objects, so that hooks,
filters, attributes, submodules and large-file extensions of the repository don't affect them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import posixpath
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from dray.code.manifest import MAX_FILES, MAX_PATH_BYTES, collision_in, fault_of
from ray_workers.shared.net_policy import (
    AllowedHosts,
    literal_address,
    refused_address,
    refused_host,
)
from ray_workers.shared.node_needs import RemoteCodeRef

LEAST_GIT = (2, 37)
"""The first version of Git that accepts addresses for a host (`http.curloptResolve`)."""
MEMORY_KIB = 4 << 20
"""Maximum address space of git, in KiB. Without a limit, objects of a hostile repository could
unpack to any size."""
LINE_BYTES = MAX_PATH_BYTES + 128
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PIECE = 1 << 20
_UNREACHABLE = re.compile(
    r"could(n't| not) (resolve|connect)|failed to connect|timed out|timeout|refused|reset by"
    r"|(recv|send) failure|empty reply|early EOF|disconnect|hung up|too slow|unreachable"
    r"|no route to|handshake|SSL_ERROR_SYSCALL|no space left|error: (408|425|429|5\d\d)",
    re.IGNORECASE,
)
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "GIT_SSL_CAINFO", "SSL_CERT_FILE", "SSL_CERT_DIR")


class CodeRefused(Exception):
    """Raised if the code can't be fetched or isn't allowed, and trying again would not help."""


class CodeUnreachable(Exception):
    """Raised if the code's server, or this node, currently can't provide the code."""


@dataclass(frozen=True)
class GitCommit:
    """A commit to fetch."""

    url: str
    commit: str
    headers: Mapping[str, str]
    allowed: AllowedHosts
    limit_bytes: int
    limit_s: float

    @classmethod
    def of(cls, code: RemoteCodeRef, headers: Mapping[str, str], limit_s: float) -> GitCommit:
        allowed = AllowedHosts(code.policy.private_hosts)
        return cls(
            *(code.git or "", code.commit or "", headers, allowed, code.limit_bytes, limit_s)
        )


@dataclass(frozen=True)
class _Entry:
    path: str
    object_id: str
    size_bytes: int
    mode: str


def fetch(wanted: GitCommit, target: Path, scratch: Path) -> list[str]:
    """Write the commit's files to a folder, and return their paths.

    scratch: a folder for git; not removed afterwards. Raises CodeRefused, CodeUnreachable, OSError.
    """
    git = _Git(wanted, scratch)
    git.run("init", "--bare", "--quiet", "--template=", git.object_format, ".")
    git.run(
        *("fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules"),
        *("--no-auto-maintenance", "--no-write-fetch-head", git.url, wanted.commit),
    )
    entries = _resolved(git, _entries(git, wanted.commit))
    _check(entries, wanted.limit_bytes)
    for entry, content in git.contents(entries):
        path = target / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            shutil.copyfileobj(content, file, _PIECE)
        path.chmod(0o755 if entry.mode == "100755" else 0o644)
    return [entry.path for entry in entries]


def _entries(git: _Git, commit: str) -> list[_Entry]:
    """Return the files and links of a commit. Raises CodeRefused if the commit has too many files
    and links."""
    out = git.run("ls-tree", "-r", "-z", "-l", commit, limit_bytes=MAX_FILES * LINE_BYTES)
    found = []
    for line in out.read_bytes().split(b"\0")[:-1]:
        head, _, path = line.partition(b"\t")
        mode, kind, object_id, size = head.decode().split()
        if kind == "blob":  # a submodule is an empty folder, as after `git clone`
            name = path.decode(errors="surrogateescape")
            found.append(_Entry(name, object_id, int(size), mode))
    return found


def _resolved(git: _Git, entries: Sequence[_Entry]) -> list[_Entry]:
    """Return the files of the commit, with each link replaced by a copy of the file or folder to
    which it points."""
    if len(entries) > MAX_FILES:
        raise CodeRefused(f"the commit has more than {MAX_FILES} files")
    files = {entry.path: entry for entry in entries if entry.mode != "120000"}
    links = [entry for entry in entries if entry.mode == "120000"]
    if any(link.size_bytes > MAX_PATH_BYTES for link in links):
        raise CodeRefused("a link in the repository is longer than the maximum length of a path")
    found = list(files.values())
    for link, content in git.contents(links):
        goal = content.read().decode(errors="surrogateescape")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(link.path), goal))
        if goal.startswith("/") or target.split("/")[0] == "..":
            raise CodeRefused(f"the link {link.path!a} points outside the repository")
        is_file = target in files
        below = [target] if is_file else [p for p in files if p.startswith(f"{target}/")]
        if not below:
            raise CodeRefused(f"the link {link.path!a} does not point to a file in the repository")
        found += [replace(files[p], path=link.path + p.removeprefix(target)) for p in below]
        if len(found) > MAX_FILES:
            break
    return found


def _check(entries: Sequence[_Entry], limit_bytes: int) -> None:
    check_paths([entry.path for entry in entries])
    total = sum(entry.size_bytes for entry in entries)
    if total > limit_bytes:
        raise too_large(f"the files have {total:,} bytes", limit_bytes)


def check_paths(paths: Sequence[str]) -> None:
    """Refuse paths that are also refused in uploads."""
    if not paths:
        raise CodeRefused("the code contains no file")
    if len(paths) > MAX_FILES:
        raise CodeRefused(f"the code has more than {MAX_FILES} files")
    for path in paths:
        if (fault := fault_of(path)) is not None:
            raise CodeRefused(f"the path {path[:200]!a} {fault}")
    if (two := collision_in(paths)) is not None:
        raise CodeRefused(f"{two[0]!a} and {two[1]!a} can't both be files")


def too_large(what: str, limit_bytes: int) -> CodeRefused:
    return CodeRefused(f"{what}; the limit is {limit_bytes:,} bytes (DRAY_CODE_LIMIT_BYTES)")


class _Git:
    """Runs the git program in a separate repository and within limits."""

    def __init__(self, wanted: GitCommit, scratch: Path) -> None:
        program = shutil.which("git")
        if program is None:
            raise CodeRefused("this node has no git: install it, or upload the code")
        self._program = program
        self._scratch = scratch
        self._limit_bytes = wanted.limit_bytes
        self._limit_s = wanted.limit_s
        self._deadline = time.monotonic() + wanted.limit_s
        self._repository = scratch / "repository"
        self._repository.mkdir()
        self.url, resolved = _pinned(wanted.url, wanted.allowed)
        self.object_format = f"--object-format={'sha1' if len(wanted.commit) == 40 else 'sha256'}"
        self._environment = _environment(self.url, resolved, wanted.headers, scratch)
        self._refuse_if_old()

    def _refuse_if_old(self) -> None:
        """Refuse old versions of Git, which would resolve the host themselves and connect to any
        address."""
        text = self.run("version").read_text()
        found = re.search(r"(\d+)\.(\d+)", text)
        if found is None or (int(found[1]), int(found[2])) < LEAST_GIT:
            least = ".".join(map(str, LEAST_GIT))
            raise CodeRefused(
                f"this node has {text.strip()[:100]}, but git {least} or newer is needed"
            )

    def run(self, *arguments: str, given: Path | None = None, limit_bytes: int = 0) -> Path:
        """Run git, and return the file with its output. If git fails, raises CodeRefused with git's
        own message, or CodeUnreachable if the server is at fault.

        limit_bytes: maximum size of each file that git writes; if 0, the code's size limit applies.
        """
        out, errors = self._scratch / "out", self._scratch / "errors"
        limit_bytes = limit_bytes or self._limit_bytes
        # `ulimit -f` expects blocks of 512 bytes, and `ulimit -v` expects KiB.
        limits = 'ulimit -f "$1"; ulimit -v "$2"; shift 2; exec "$@"'
        blocks = str(-(-limit_bytes // 512))
        shell = ["/bin/sh", "-c", limits, "sh", blocks, str(MEMORY_KIB), self._program]
        with (
            out.open("wb") as output,
            errors.open("wb") as faults,
            given.open("rb") if given else contextlib.nullcontext(subprocess.DEVNULL) as source,
        ):
            code = self._within_limit(
                subprocess.Popen(
                    [*shell, *arguments],
                    cwd=self._repository,
                    env=self._environment,
                    stdin=source,
                    stdout=output,
                    stderr=faults,
                    start_new_session=True,
                )
            )
        if code != 0:
            raise self._fault(code, errors.read_text(errors="replace"), limit_bytes)
        return out

    def _within_limit(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise CodeUnreachable(f"git timed out after {self._limit_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _fault(self, code: int, text: str, limit_bytes: int) -> Exception:
        packs = (self._repository / "objects" / "pack").glob("*")
        is_cut = any(path.stat().st_size > limit_bytes - _PIECE // 2 for path in packs)
        if code == -signal.SIGXFSZ or is_cut:
            return too_large("the repository is too large or contains too many names", limit_bytes)
        errors = [line for line in text.splitlines() if line.startswith(("fatal: ", "error: "))]
        sentence = (errors or [f"git exited with code {code}"])[-1][:500]
        sentence = "".join(c if c.isprintable() else "?" for c in sentence)
        if _UNREACHABLE.search(sentence):
            return CodeUnreachable(sentence)
        hint = ": set code.credentials to a file on the nodes" if "could not read" in text else ""
        return CodeRefused(sentence + hint)

    def contents(self, entries: Sequence[_Entry]) -> Iterator[tuple[_Entry, _Window]]:
        """Yield each entry with its content, which must be read before the next entry is
        requested."""
        if not entries:
            return
        asked = self._scratch / "asked"
        asked.write_text("".join(f"{entry.object_id}\n" for entry in entries))
        size = sum(entry.size_bytes + LINE_BYTES for entry in entries)
        out = self.run("cat-file", "--batch", "--buffer", given=asked, limit_bytes=size)
        start = 0
        with out.open("rb") as stream:
            for entry in entries:
                stream.seek(start)
                head = stream.readline()
                if head.split() != f"{entry.object_id} blob {entry.size_bytes}".encode().split():
                    raise CodeRefused(f"the repository lacks the file {entry.path!a}")
                start = stream.tell() + entry.size_bytes + 1
                yield entry, _Window(stream, entry.size_bytes)


class _Window:
    """The next bytes of a stream, as a file object."""

    def __init__(self, stream: IO[bytes], left: int) -> None:
        self._stream = stream
        self._left = left

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._stream.read(wanted)
        self._left -= len(data)
        return data


def _pinned(url: str, allowed: AllowedHosts) -> tuple[str, str]:
    """Return the canonical URL, and the addresses of its host to which git must connect, because a
    lookup by git itself could return other addresses. Raises CodeRefused, CodeUnreachable."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]
    reason = refused_host(host, allowed)
    if reason is not None:
        raise _refused(host, reason)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise CodeUnreachable(f"the host name {host} can't be resolved") from None
    addresses = {ipaddress.ip_address(str(sockaddr[0]).split("%", 1)[0]) for *_, sockaddr in found}
    is_named = allowed.has_name(host)
    for address in addresses:
        if not is_named and (reason := refused_address(address, allowed)) is not None:
            raise _refused(host, reason)
        if parts.scheme != "https" and not is_named and not allowed.has_address(address):
            raise _refused(
                host, "Git repositories are only read over https://, except from private hosts"
            )
    name = f"[{host}]" if ":" in host else host
    listed = ",".join(
        f"[{one}]" if one.version == 6 else str(one) for one in sorted(addresses, key=str)
    )
    pin = "" if literal_address(host) else f"{host}:{port}:{listed}"
    return f"{parts.scheme}://{name}:{port}{parts.path}", pin


def _refused(host: str, reason: str) -> CodeRefused:
    return CodeRefused(f"reading from {host} is not allowed: {reason} (DRAY_DATA_PRIVATE_HOSTS)")


def _environment(url: str, resolved: str, headers: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the environment variables that configure git. Git reads no other configuration."""
    settings = [
        ("core.hooksPath", "/dev/null"),
        ("core.bigFileThreshold", "16m"),  # larger files are not held in memory
        ("credential.helper", ""),
        ("fetch.fsckObjects", "true"),
        ("fetch.unpackLimit", "1"),  # a single pack, whose size is limited
        ("gc.auto", "0"),
        ("http.followRedirects", "false"),
        ("http.lowSpeedLimit", "1000"),
        ("http.lowSpeedTime", "60"),
        ("http.proxy", ""),
        ("pack.threads", "1"),
        ("protocol.version", "2"),
        *([("http.curloptResolve", resolved)] if resolved else []),
        # Headers are not passed as arguments, because every user of the machine can list a
        # program's arguments.
        *(("http.extraHeader", f"{name}: {value}") for name, value in headers.items()),
    ]
    found = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    found |= {
        "HOME": str(home),
        "LC_ALL": "C",
        "GIT_ALLOW_PROTOCOL": urlsplit(url).scheme,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": str(len(settings)),
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_DIR": ".",
        "GIT_TERMINAL_PROMPT": "0",
    }
    for number, (key, value) in enumerate(settings):
        found |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return found
