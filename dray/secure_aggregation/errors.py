"""Errors of a round of secure aggregation."""

from __future__ import annotations


def missing_package(error: ModuleNotFoundError) -> ImportError:
    """Says what to install, where a machine has `dray` alone."""
    return ImportError(
        f"secure aggregation needs the package {error.name}: pip install 'dray[client]'",
        name=error.name,
    )


class MessageRefused(Exception):
    """A message was not what the protocol allows. The round goes on without it."""

    def __init__(self, sender: str, reason: str) -> None:
        """sender: the name of the client, or "server"."""
        super().__init__(f"the message of {sender} is refused: {reason}")


class TooFewClients(Exception):
    """So many clients were lost that the round has no result."""


class WrongShares(Exception):
    """The shares of a client's secret do not give it, so the round has no result. That says nothing
    of who lied: `MaskingServer.liars` does."""

    def __init__(self, client: str, reason: str) -> None:
        """client: the one whose secret it is."""
        super().__init__(f"the secret of {client} can't be put together from its shares: {reason}")
