"""Sources with `s3://bucket/key`: an object, or all objects with a prefix.

The S3 endpoint is determined by the operator (with `DRAY_S3_ENDPOINT_URL`, a credentials file, or
the node's own configuration), never by the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import botocore.exceptions as aws
import s3fs

from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.core.types import Listed, Listing, Sink, TransferError, is_data
from ray_workers.datasets.sources.credentials import Options
from ray_workers.shared.node_needs import DataPolicy

PIECE_BYTES = 8 << 20
_CLIENT_OPTIONS = ("key", "secret", "token", "anon")


class S3Origin:
    """Objects in a bucket, read with the named credentials or the node's own identity."""

    def __init__(
        self, url: str, policy: DataPolicy, options: Options, suffixes: tuple[str, ...] | None
    ) -> None:
        self._location = url
        self._path = url.removeprefix("s3://").rstrip("/")
        self._suffixes = suffixes
        self._is_folder = False
        self._filesystem = s3fs.S3FileSystem(
            **{name: options[name] for name in _CLIENT_OPTIONS if name in options},
            endpoint_url=options.get("endpoint_url") or policy.s3_endpoint_url,
            skip_instance_cache=True,
            use_listings_cache=False,
            # Don't retry here, because `retried` retries from the start of a file.
            config_kwargs={
                "connect_timeout": 30,
                "read_timeout": 60,
                "retries": {"max_attempts": 0},
            },
        )

    def listing(self) -> Listing:
        with self._translating_errors():
            info = self._filesystem.info(self._path)
            self._is_folder = info["type"] != "file"
            if not self._is_folder:
                return Listing((_listed(self._path.rsplit("/", 1)[-1], info),), is_folder=False)
            if self._suffixes is None:
                raise broken(self._location, "is a folder, but this format requires a single file")
            found = self._filesystem.find(self._path, detail=True)
        files = [
            _listed(path.removeprefix(f"{self._path}/"), info)
            for path, info in sorted(found.items())
            if self._counts(path) and info["type"] == "file"
        ]
        return Listing(tuple(files), is_folder=True)

    def fetch(self, file: Listed, sink: Sink) -> None:
        path = f"{self._path}/{file.name}" if self._is_folder else self._path
        with (
            self._translating_errors(),
            self._filesystem.open(
                path, "rb", block_size=PIECE_BYTES, cache_type="readahead", size=file.size_bytes
            ) as source,
        ):
            while piece := source.read(PIECE_BYTES):
                sink(piece)

    def _counts(self, path: str) -> bool:
        assert self._suffixes is not None
        parts = PurePosixPath(path.removeprefix(f"{self._path}/"))
        return all(map(is_data, parts.parts)) and parts.name.lower().endswith(self._suffixes)

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Raise errors with dray's own messages, because S3's messages can show how a request was
        signed."""
        try:
            yield
        except FileNotFoundError:
            raise broken(self._location, "this object, folder or bucket does not exist") from None
        except PermissionError:
            raise broken(
                self._location,
                "S3 denies access with these credentials; set data.credentials to use other "
                "credentials",
            ) from None
        except (aws.NoCredentialsError, aws.PartialCredentialsError):
            raise broken(
                self._location,
                "this node has no credentials for S3; set data.credentials",
            ) from None
        except aws.ParamValidationError:
            raise broken(self._location, "is not a valid bucket and key") from None
        except aws.ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"):
                raise broken(self._location, f"S3 rejects the credentials ({code})") from None
            raise TransferError(f"S3 responded with {code or 'an error'}") from None
        except (aws.BotoCoreError, OSError) as error:
            raise TransferError(f"the transfer failed ({type(error).__name__})") from None


def _listed(name: str, info: dict[str, Any]) -> Listed:
    version = f"{info.get('ETag')}:{info.get('LastModified')}"
    return Listed(name, info["size"], version)
