"""Paths of a node's files of one deployment, such as its forkserver's socket and its spools.

All are under the system's temporary folder. The path of a Unix socket has at most 107 bytes, so if
the path of the temporary folder is long, paths begin with a short link to the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

NODE_TMPDIR = "DRAY_TMPDIR"
"""Variable with the node's temporary folder, for processes with a temporary TMPDIR of their own."""
SHORT_TMP = Path("/tmp")
"""The folder for links to a temporary folder with a long path."""
SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket (unix(7))."""
BYTES_BELOW_ROOT = 82
"""Length of the longest path of a socket below `machine_root`, which Ray's dashboard uses:
`/ray-INSTANCE/session_YYYY-MM-DD_HH-MM-SS_MICROS_PID/sockets/dash_TaskEventsHead`."""


def nonce_path(storage_url: str) -> Path | None:
    """The file with the service's nonce, if the storage is a folder; None for other storage.

    A node that reads another text from the file does not see the service's files.
    """
    url = urlsplit(storage_url)
    return Path(url.path, ".dray-nonce") if url.scheme == "file" else None


def entries(folder: Path) -> list[Path]:
    """The entries of a folder; none if it does not exist or is removed now (`glob` may raise)."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


class UntrustedFolder(PermissionError):
    """A folder into which another user may have put files."""


def machine_root() -> Path:
    """The folder for files of this user's dray that do not outlive a boot of this machine.

    Its name can be guessed, and every user may create folders next to it. Raises UntrustedFolder if
    another user created it, or if it is open to others.
    """
    temporary = os.environ.get(NODE_TMPDIR) or tempfile.gettempdir()
    root = Path(temporary, f"dray-{os.getuid()}")
    own_folder(root)
    is_short = len(os.fsencode(root)) + BYTES_BELOW_ROOT <= SOCKET_PATH_BYTES
    return root if is_short else _short_link(root)


def _short_link(root: Path) -> Path:
    """A short path to the folder, equal in every process: a link in a folder that no other user may
    write to. The files are still on the disk that the user chose."""
    links = SHORT_TMP / root.name
    own_folder(links)
    digest = hashlib.sha256(os.fsencode(root)).hexdigest()
    for link in (links / digest[i : i + 4] for i in range(0, len(digest), 4)):
        if _is_link_to(link, root):
            return link
        _remove_dead_links(links)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(root)
        if _is_link_to(link, root):
            return link
    raise UntrustedFolder(f"no link to {root} can be made in {links}: set TMPDIR to a short path")


def _is_link_to(link: Path, target: Path) -> bool:
    return link.is_symlink() and link.readlink() == target


def _remove_dead_links(folder: Path) -> None:
    """Remove links to temporary folders that are gone; some batch systems make a folder per job."""
    for path in entries(folder):
        if path.is_symlink() and not path.exists():
            path.unlink(missing_ok=True)


def own_folder(path: Path, setting: str = "TMPDIR") -> None:
    """Create a folder that only this user may enter, or check that an existing folder is private.

    A folder that others could only read is closed to them. Raises UntrustedFolder if others could
    write to the folder, since closing it would not remove what they wrote.
    setting: the variable that moves the folder elsewhere, for that error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        reason = "is not a folder"
    elif status.st_uid != os.getuid():
        reason = f"belongs to the user with id {status.st_uid}, not to {os.getuid()}"
    elif mode & 0o022:
        reason = f"can be written to by other users (mode {mode:04o})"
    else:
        if mode & 0o077:
            path.chmod(0o700)
        return
    raise UntrustedFolder(
        f"{path} {reason}: remove it, or set {setting} to a folder that only this user may write to"
    )


def compiled_code_dir() -> Path:
    """The folder for code that torch compiled (`train.compile`), shared by this user's jobs."""
    return machine_root() / "compiled"


def code_dir() -> Path:
    """The folder for copies of uploaded code, each named by the hash of its manifest."""
    return machine_root() / "code"


def deployment_root(deployment_id: str) -> Path:
    """The folder of one deployment on this machine."""
    return machine_root() / deployment_id


def runtime_dir(deployment_id: str, node_id: str) -> Path:
    """The folder of one node. Several nodes may share a machine; node ids of Ray's own test
    clusters differ only at the end."""
    return deployment_root(deployment_id) / node_id[-16:]


def socket_path(deployment_id: str, node_id: str) -> str:
    return str(runtime_dir(deployment_id, node_id) / "fork.sock")


def preloaded_path(socket: str) -> Path:
    """The file in which the forkserver at this socket lists the modules that it has imported."""
    return Path(socket).with_name("preloaded")


def spools_of(runtime_dir: Path) -> Path:
    """The folder of a node's spools, by job and attempt."""
    return runtime_dir / "spool"


def spool_dir(deployment_id: str, node_id: str, job_id: str, attempt: int) -> Path:
    """The folder of the spools of one attempt on one node."""
    return spools_of(runtime_dir(deployment_id, node_id)) / job_id / str(attempt)


def temp_dir(deployment_id: str, node_id: str, job_id: str, attempt: int) -> Path:
    """The folder for temporary files of one attempt's ranks on one node. Its name is short, because
    `multiprocessing` creates sockets there."""
    name = hashlib.sha256(f"{job_id}:{attempt}".encode()).hexdigest()[:8]
    return runtime_dir(deployment_id, node_id) / "tmp" / name


def folders_dir(deployment_id: str, node_id: str, job_id: str, attempt: int) -> Path:
    """The folders on one node into which one attempt's script writes files for dray to keep
    (`ray_workers.node.folders.job_folders`)."""
    return runtime_dir(deployment_id, node_id) / "folders" / job_id / str(attempt)


def work_root(deployment_id: str) -> Path:
    """The directories that scripts run in, by job. They outlive a Ray node, and are used by the
    next Ray node on this machine."""
    return machine_root() / f"work-{deployment_id}"


def page_dir(deployment_id: str, node_id: str, job_id: str, attempt: int) -> Path:
    """The folder of the heartbeat pages of one attempt's ranks on one node."""
    return runtime_dir(deployment_id, node_id) / "pages" / job_id / str(attempt)
