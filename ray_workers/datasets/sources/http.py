"""Sources with `http://` and `https://`: a single file, downloaded with GET.

aiohttp is used directly, because fsspec follows redirects automatically. The address of every
connection is checked when the connection is opened, including after redirects. Proxies from the
environment are not used, because the addresses to which they connect can't be checked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp
from yarl import URL

from ray_workers.datasets.core.errors import broken, shortened
from ray_workers.datasets.core.types import Listed, Listing, Sink, TransferError
from ray_workers.datasets.sources.credentials import Options, headers_for
from ray_workers.shared.guarded_sockets import RefusedAddress, socket_factory
from ray_workers.shared.net_policy import AllowedHosts
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError

MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
WORTH_ANOTHER_TRY = (408, 425, 429, 500, 502, 503, 504)
PIECE_BYTES = 1 << 20
UNVERSIONED_TRUSTED_S = 600.0
"""Number of seconds for which a copy is considered current if the server sends no version, so that
ranks share the copy."""
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=30, sock_connect=30, sock_read=60)

_IN_NO_URL = re.compile(r"[\\\s\x00-\x1f\x7f]")


class NoSuchFileError(DataError):
    """The server has no such file."""


class HttpOrigin:
    """A file on a web server. Web servers can't list folders."""

    def __init__(
        self, url: str, policy: DataPolicy, options: Options, name: str | None = None
    ) -> None:
        """name: the name of the file in its source; by default the last part of the URL."""
        self._url = url
        self._name = name or PurePosixPath(unquote(urlsplit(url).path)).name or "index"
        self._location = url.split("?", 1)[0]
        self._headers = headers_for(url, options)
        self._allowed = AllowedHosts(policy.private_hosts)

    def listing(self) -> Listing:
        listed = asyncio.run(self.look())
        return Listing((listed,), False, None if listed.version else UNVERSIONED_TRUSTED_S)

    def fetch(self, file: Listed, sink: Sink) -> None:
        asyncio.run(self._read(file, sink))

    async def look(self) -> Listed:
        """Return the file as the server describes it. Raises NoSuchFileError."""
        async with self._response() as response:
            return self._listed(response)

    async def _read(self, file: Listed, sink: Sink) -> None:
        async with self._response() as response:
            if self._listed(response) != file:
                raise TransferError("the file changed while it was being read")
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                sink(piece)

    def _listed(self, response: aiohttp.ClientResponse) -> Listed:
        headers = response.headers
        version = headers.get("ETag") or headers.get("Last-Modified") or ""
        return Listed(self._name, response.content_length, version)

    @asynccontextmanager
    async def _response(self) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the final response after all redirects. Errors don't show the headers."""
        try:
            url = self._url
            for _ in range(MAX_REDIRECTS + 1):
                async with self._asked(url) as response:
                    if response.status not in REDIRECTS:
                        self._check_status(response)
                        yield response
                        return
                    url = self._next(url, response.headers.get("Location"))
            raise broken(self._location, f"redirects more than {MAX_REDIRECTS} times")
        except RefusedAddress as error:
            reason = (
                f"reading from {error.host} is not allowed: {error.reason} "
                "(DRAY_DATA_PRIVATE_HOSTS)"
            )
            raise broken(self._location, reason) from None
        except aiohttp.InvalidURL:
            raise self._no_address() from None
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise TransferError(_reason(error)) from None
        except ValueError:  # raised by yarl, urllib or the host name codec
            raise self._no_address() from None

    @asynccontextmanager
    async def _asked(self, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        # Request the file without a content encoding, because the hash is computed from the stored
        # file, and because a small response must not be decompressed to a large file.
        headers = {"Accept-Encoding": "identity"}
        if URL(url).origin() == URL(self._url).origin():
            headers |= self._headers
        guard = socket_factory(urlsplit(url).hostname or "", self._allowed)
        connector = aiohttp.TCPConnector(socket_factory=guard, force_close=True)
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=TIMEOUT, auto_decompress=False, trust_env=False
            ) as session,
            session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            yield response

    def _next(self, url: str, location: str | None) -> str:
        """Return the target of a redirect. Raises DataError if the target is not a web URL, or if
        the redirect leads from https to http.

        Certain characters are treated as a slash by some programs and as part of the host name by
        others. Such characters are rejected, because the checked host might differ from the host of
        the request."""
        if not location:
            raise TransferError("the server sent a redirect without an address")
        if _IN_NO_URL.search(location):
            raise broken(
                self._location,
                f"redirects to {shortened(location)}, which is not a URL: URLs can't contain "
                "backslashes, spaces or control characters. Use the URL of the file itself",
            )
        target = urljoin(url, location)
        schemes = (urlsplit(url).scheme, urlsplit(target).scheme)
        if schemes[1] not in ("http", "https") or schemes == ("https", "http"):
            raise broken(
                self._location,
                f"redirects from {schemes[0]}:// to {schemes[1] or 'none'}://, which is not "
                "allowed",
            )
        return target

    def _no_address(self) -> DataError:
        return broken(self._location, "leads to an invalid URL")

    def _check_status(self, response: aiohttp.ClientResponse) -> None:
        status = response.status
        if status == 200:
            return
        if status in WORTH_ANOTHER_TRY:
            raise TransferError(f"the server responded with {status}")
        known = {
            401: "the server requires credentials (401): set `credentials`",
            403: "the server denies access (403)",
            404: "the file does not exist (404)",
            410: "the file no longer exists (410)",
        }
        error = broken(
            self._location, known.get(status, f"the server responded with {status} instead of 200")
        )
        raise NoSuchFileError(str(error)) if status in (404, 410) else error


def _reason(error: Exception) -> str:
    """Return a description of the error, without the request."""
    if isinstance(error, TimeoutError):
        return "the server did not respond in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "the server's certificate can't be verified"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host name can't be resolved"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or 'refused'}"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the server closed the connection too early"
    return f"the transfer failed ({type(error).__name__})"
