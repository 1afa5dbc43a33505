"""Named credentials that the cluster's operator has placed on the nodes.

A file `{name}.json` in the folder contains options for the storage. For `s3://`, these are `key`,
`secret`, `token`, `anon` and `endpoint_url`. For `https://`, these are `headers`, the `hosts` to
which the headers can be sent (so that a job document can't choose these hosts), and optionally
`"plain_http": true`. The options are passed only to the storage's client, and errors must not show
them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ray_workers.training.core.errors import DataError

Options = Mapping[str, Any]
KNOWN_OPTIONS = ("key", "secret", "token", "anon", "endpoint_url", "headers", "hosts", "plain_http")
DEFAULT_PORTS = {"http": 80, "https": 443}


def load_credentials(folder: str | None, name: str | None) -> Options:
    """Return the options in the file, or no options if `name` is None. Raises DataError."""
    if name is None:
        return {}
    if folder is None:
        raise DataError(
            f"data.credentials is {name!r}, but this cluster has no credentials folder "
            "(DRAY_DATA_CREDENTIALS_DIR)"
        )
    path = Path(folder) / f"{name}.json"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise DataError(
            f"data.credentials is {name!r}, but its file can't be read on this node: "
            f"{error.strerror}"
        ) from None
    with open(fd, "rb") as file:
        _refuse_if_open_to_others(os.fstat(fd), name)
        text = file.read()
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict) or not set(options) <= set(KNOWN_OPTIONS):
        known = ", ".join(KNOWN_OPTIONS)
        raise DataError(
            f"the credentials {name!r} must be a JSON object with only the keys {known}"
        )
    return options


def headers_for(url: str, options: Options) -> dict[str, str]:
    """Return the headers of the credentials, if they may be sent to this source. Raises
    DataError."""
    if not options.get("headers"):
        return {}
    parts, hosts = urlsplit(url), options.get("hosts")
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise DataError(
            "the credentials have headers but no hosts: add the hosts to their file, "
            'such as "hosts": ["data.example.org"]'
        )
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else str(parts.hostname)
    usual = DEFAULT_PORTS[parts.scheme]
    port = parts.port or usual
    named = {f"{host}:{port}", *((host, parts.hostname) if port == usual else ())}
    if named.isdisjoint(entry.lower() for entry in hosts):
        raise DataError(
            f"the credentials are not for {host}:{port}: their file lists other hosts (a host "
            f"without a port means port {usual})"
        )
    if parts.scheme != "https" and options.get("plain_http") is not True:
        raise DataError(
            'the credentials are only for https://, unless their file has "plain_http": true'
        )
    return dict(options["headers"])


def _refuse_if_open_to_others(status: os.stat_result, name: str) -> None:
    if status.st_uid not in (0, os.getuid()):
        raise DataError(f"the credentials {name!r} must be owned by dray's user or root")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise DataError(
            f"the credentials {name!r} can be read by other users of this node: their file must "
            "have mode 0600 or 0400"
        )
