"""Paths of a deployment's files on a node, such as the forkserver's socket and the spools.

All of these paths are under the system's temporary folder. If the path of this folder is long,
paths begin with a short link to it, because the path of a Unix socket can be at most 107 bytes
long.
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
"""Variable with the node's temporary folder, for processes that have a different TMPDIR."""
SHORT_TMP = Path("/tmp")
"""The folder for links to a temporary folder with a long path."""
SOCKET_PATH_BYTES = 107
"""Maximum length of a Unix socket's path (unix(7))."""
BYTES_BELOW_ROOT = 82
"""Length of the longest socket path below `machine_root`. Ray's dashboard uses this path:
`/ray-INSTANCE/session_YYYY-MM-DD_HH-MM-SS_MICROS_PID/sockets/dash_TaskEventsHead`."""


def nonce_path(storage_url: str) -> Path | None:
    """Return the file with the service's nonce if the storage is a folder; None otherwise.

    If the nonce that a node reads differs from the service's, the node's storage folder is not the
    service's folder.
    """
    url = urlsplit(storage_url)
    return Path(url.path, ".dray-nonce") if url.scheme == "file" else None


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder, or an empty list if the folder does not exist or is being
    removed (while it is being removed, `glob` could raise an error)."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


class UntrustedFolder(PermissionError):
    """Another user may have put files into the folder."""


def machine_root() -> Path:
    """Return the folder for this user's dray files that need not survive a reboot of this machine.

    Any user could have created this folder, because its name can be guessed. Raise
    UntrustedFolder if another user created the folder, or if other users can write to it.
    """
    temporary = os.environ.get(NODE_TMPDIR) or tempfile.gettempdir()
    root = Path(temporary, f"dray-{os.getuid()}")
    own_folder(root)
    is_short = len(os.fsencode(root)) + BYTES_BELOW_ROOT <= SOCKET_PATH_BYTES
    return root if is_short else _short_link(root)


def _short_link(root: Path) -> Path:
    """Return a short path to the folder. The path, which is the same in every process, is a link
    in a folder to which no other user can write. The files themselves remain on the disk that the
    user chose."""
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
    raise UntrustedFolder(f"can't create a link to {root} in {links}: set TMPDIR to a short path")


def _is_link_to(link: Path, target: Path) -> bool:
    return link.is_symlink() and link.readlink() == target


def _remove_dead_links(folder: Path) -> None:
    """Remove links to temporary folders that no longer exist; some batch systems create one per
    job."""
    for path in entries(folder):
        if path.is_symlink() and not path.exists():
            path.unlink(missing_ok=True)


def own_folder(path: Path, setting: str = "TMPDIR") -> None:
    """Create a folder that only this user can enter, or check that an existing folder is private.

    If other users can read the folder but not write to it, their permissions are removed. Raise
    UntrustedFolder if other users could write to the folder, since removing their permissions would
    not remove the files that they wrote. The error names `setting`, the variable that moves the
    folder elsewhere.
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
        f"{path} {reason}: remove it, or set {setting} to a folder that only this user can write to"
    )


def compiled_code_dir() -> Path:
    """Return the folder for code compiled by torch (`train.compile`), which this user's jobs
    share."""
    return machine_root() / "compiled"


def code_dir() -> Path:
    """Return the folder for copies of uploaded code, each named by the hash of its manifest."""
    return machine_root() / "code"


def deployment_root(deployment_id: str) -> Path:
    """Return the folder of a deployment on this machine."""
    return machine_root() / deployment_id


def runtime_dir(deployment_id: str, node_id: str) -> Path:
    """Return the folder of a node. Several nodes can share a machine. The folder is named after the
    end of the node id, because the ids of nodes in Ray's test clusters differ only at the end."""
    return deployment_root(deployment_id) / node_id[-16:]


def socket_path(deployment_id: str, node_id: str) -> str:
    return str(runtime_dir(deployment_id, node_id) / "fork.sock")


def preloaded_path(socket: str) -> Path:
    """Return the file in which the forkserver at this socket lists the modules it has imported."""
    return Path(socket).with_name("preloaded")


def spools_of(runtime_dir: Path) -> Path:
    """Return the folder of a node's spools, which are sorted by job and attempt."""
    return runtime_dir / "spool"


def spool_dir(deployment_id: str, node_id: str, job_id: str, attempt: int) -> Path:
    """Return the folder of an attempt's spools on a node."""
    return spools_of(runtime_dir(deployment_id, node_id)) / job_id / str(attempt)


def temp_dir(deployment_id: str, node_id: str, job_id: str, attempt: int) -> Path:
    """Return the folder for temporary files of an attempt's ranks on a node. Its name is short,
    because `multiprocessing` creates sockets in this folder."""
    name = hashlib.sha256(f"{job_id}:{attempt}".encode()).hexdigest()[:8]
    return runtime_dir(deployment_id, node_id) / "tmp" / name


def folders_dir(deployment_id: str, node_id: str, job_id: str, attempt: int) -> Path:
    """Return the directory on a node that contains the folders of an attempt's script, such as its
    output folder (`ray_workers.node.folders.job_folders`)."""
    return runtime_dir(deployment_id, node_id) / "folders" / job_id / str(attempt)


def work_root(deployment_id: str) -> Path:
    """Return the folder with the working directory of each job's script. The directories outlive a
    Ray node, and the next Ray node on this machine uses them again."""
    return machine_root() / f"work-{deployment_id}"


def page_dir(deployment_id: str, node_id: str, job_id: str, attempt: int) -> Path:
    """Return the folder of the heartbeat pages of an attempt's ranks on a node."""
    return runtime_dir(deployment_id, node_id) / "pages" / job_id / str(attempt)
