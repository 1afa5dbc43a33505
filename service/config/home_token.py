"""The token of a service without a tokens file, which its first start writes into the home."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from dray import home_token
from dray.home_token import UnsafeTokenFile
from service.config.home_lock import keep_private
from service.config.start_refusals import StartRefused, reason_of


class HomeTokenUnusable(StartRefused):
    """The file of the token can't be used or made."""


def ensure(home: Path) -> str:
    """The token in the home, written if there is none. Raises HomeTokenUnusable.

    The file gets its name when it is complete, and never replaces another: of two services that
    start at once, both get the token of the first.
    """
    path = home_token.path_in(home)
    try:
        keep_private(home)
        found = home_token.read(home)
        if found is None:
            _write(path, f"{home_token.PREFIX}{secrets.token_urlsafe(32)}\n")
            found = home_token.read(home)
    except UnsafeTokenFile as error:
        raise HomeTokenUnusable(f"{path} {error}: delete it, and start again") from None
    except OSError as error:
        raise HomeTokenUnusable(
            f"{path} {reason_of(error)}: correct that, or set DRAY_HOME to another folder"
        ) from error
    if found is None:
        raise HomeTokenUnusable(f"{path} was deleted while the service started: start it again")
    return found


def _write(path: Path, content: str) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
