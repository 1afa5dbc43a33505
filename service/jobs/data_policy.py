"""Checks whether submitted jobs may read their data.

A forbidden URL is refused here, while the user waits for the response. The node later applies the
same rules to facts that only the node can determine: the target of a link, and the current address
of a name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dray.spec import Data, Environment, Gpt, Imported, JobSpec, Pretrained
from dray.spec.program import base_files
from dray.spec.program.code import RemoteCode
from ray_workers.shared.net_policy import (
    Address,
    AllowedHosts,
    canonical_host,
    literal_address,
    refused_address,
    refused_host,
)
from ray_workers.shared.node_needs import DataPolicy
from service.domain.errors import DataSourceForbidden, InvalidDocument

LOOKUP_TIMEOUT_S = 2.0
"""Maximum time in seconds to resolve a name. A name that is not resolved in time is accepted,
because the worker checks it again."""
MAX_PACKAGE_HOSTS = 20
"""Maximum number of package hosts of a job, since each look-up can take `LOOKUP_TIMEOUT_S`."""

# Use a separate thread pool, so that look-ups that get no response block only these threads.
_lookups = ThreadPoolExecutor(4, thread_name_prefix="dns")


async def refuse_forbidden(spec: JobSpec, policy: DataPolicy) -> None:
    """Raise DataSourceForbidden if the job names a source that jobs may not read."""
    for pointer, source in sources_of(spec.data):
        await _check(source, pointer, policy)
    for number, silo in enumerate((spec.federated and spec.federated.silos) or ()):
        if silo.source is not None:
            await _check(silo.source, f"/federated/silos/{number}/source", policy)
    if isinstance(spec.model, Gpt | Imported) and spec.model.tokenizer is not None:
        await _check(spec.model.tokenizer, "/model/tokenizer", policy)
    if isinstance(spec.model, Pretrained):
        await _check(base_files.web_address(spec.model.base), "/model/base", policy)
    if (code := spec.remote_code) is not None:
        await _check(code.address, f"/script/code/{'git' if code.git else 'url'}", policy)
        await _check_encryption(code, AllowedHosts(policy.private_hosts))
    if spec.environment is not None:
        await _check_packages(spec.environment, AllowedHosts(policy.private_hosts))


def sources_of(data: Data) -> Iterator[tuple[str, str]]:
    """Yield (pointer, URL) of each source of the data."""
    if data.sources is None:
        yield "/data/source", data.source
    for number, one in enumerate(data.sources or ()):
        yield f"/data/sources/{number}/source", one.source
    if data.validation is not None:
        yield "/data/validation", data.validation


async def _check_encryption(code: RemoteCode, allowed: AllowedHosts) -> None:
    """Allow repositories without encryption only on hosts that the operator has listed."""
    url = urlsplit(code.git or "")
    host = url.hostname or ""
    if url.scheme != "http" or is_named(host, allowed):
        return
    if literal_address(host) is None:
        found = await _addresses(host)
        if all(
            allowed.has_address(one) for one in found
        ):  # also allowed if only the nodes can resolve the name
            return
    raise DataSourceForbidden(
        f"repositories on {host} can be read only over https://",
        pointer="/script/code/git",
        hint="the operator can allow http:// for a host by listing it in DRAY_DATA_PRIVATE_HOSTS",
    )


async def _check_packages(environment: Environment, allowed: AllowedHosts) -> None:
    """Check each package host once. A host that is contacted without encryption must be listed in
    the operator's settings."""
    checked: set[tuple[str, bool]] = set()
    for pointer, address in environment.addresses:
        url = urlsplit(address)
        host = url.hostname or ""
        kind = (host, url.scheme.endswith("http"))
        if kind in checked:
            continue
        if len(checked) >= MAX_PACKAGE_HOSTS:
            raise DataSourceForbidden(
                f"packages come from more than {MAX_PACKAGE_HOSTS} hosts", pointer=pointer
            )
        if url.scheme.endswith("http") and not is_named(host, allowed):
            raise DataSourceForbidden(
                f"packages can be fetched from {host} only over https://",
                pointer=pointer,
                hint="the operator can allow http:// for a host by listing it in "
                "DRAY_DATA_PRIVATE_HOSTS",
            )
        await _check_host(host, pointer, allowed)
        checked.add(kind)


def is_named(host: str, allowed: AllowedHosts) -> bool:
    """Whether the operator's settings list this host by its name or its address."""
    address = literal_address(canonical_host(host))
    return allowed.has_name(host) or (address is not None and allowed.has_address(address))


async def _check(source: str, pointer: str, policy: DataPolicy) -> None:
    url = urlsplit(source)
    if url.scheme == "upload" and not pointer.startswith("/data/"):
        raise InvalidDocument(
            "can't be an uploaded file: only the fields of data can name uploaded files",
            pointer=pointer,
        )
    if url.scheme == "file":
        _check_path(unquote(url.path), pointer, policy)
    elif url.scheme in ("http", "https"):
        await _check_host(url.hostname or "", pointer, AllowedHosts(policy.private_hosts))


def _check_path(path: str, pointer: str, policy: DataPolicy) -> None:
    if policy.file_roots is None:
        return
    plain = Path(os.path.normpath(path))
    if not any(plain.is_relative_to(os.path.normpath(root)) for root in policy.file_roots):
        roots = ", ".join(policy.file_roots)
        raise DataSourceForbidden(
            f"{plain} is outside the folders from which jobs may read data"
            if roots
            else "this server does not allow jobs to read files on the nodes",
            pointer=pointer,
            hint=f"jobs may read these folders: {roots}"
            if roots
            else "the operator can allow folders in DRAY_DATA_ROOTS",
        )


async def why_refused(host: str, allowed: AllowedHosts) -> str | None:
    """Return why the host's name or current addresses are forbidden; None if they are allowed."""
    reason = refused_host(host, allowed)
    if reason is None and not allowed.has_name(host) and literal_address(host) is None:
        refused = (refused_address(one, allowed) for one in await _addresses(host))
        reason = next((one for one in refused if one is not None), None)
    return reason


async def _check_host(host: str, pointer: str, allowed: AllowedHosts) -> None:
    reason = await why_refused(host, allowed)
    if reason is not None:
        raise DataSourceForbidden(
            f"jobs may not read from {host}: {reason}",
            pointer=pointer,
            hint="the operator can allow private hosts in DRAY_DATA_PRIVATE_HOSTS",
        )


async def _addresses(host: str) -> list[Address]:
    """Return all addresses of a name; an empty list if it has none or the look-up takes too
    long."""
    loop = asyncio.get_running_loop()
    looking = loop.run_in_executor(_lookups, socket.getaddrinfo, host, None, 0, socket.SOCK_STREAM)
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            found = await looking
    except (OSError, UnicodeError, TimeoutError):
        return []
    return [ipaddress.ip_address(str(address[0]).split("%", 1)[0]) for *_, address in found]
