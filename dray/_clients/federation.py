"""Federated jobs: clients outside of the cluster, and taking part as one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from os import PathLike
from pathlib import Path

from dray import views
from dray._clients.base import AsyncCalls, BlockingCalls
from dray._http import federation
from dray.federation import trainer_of


class FederationCalls(BlockingCalls):
    def invite_clients(self, job_id: str, clients: int = 1) -> list[views.Invitation]:
        """Invite clients outside of the cluster to a federated job; raises TooManyClients if as
        many are invited as its document has. Their tokens are told this once."""
        return self._driver.run(federation.invite(self._flows, job_id, clients))

    def federated_clients(self, job_id: str) -> views.FederatedClientPage:
        """The clients that were invited to a job, and its newest round."""
        return self._driver.run(federation.clients(self._flows, job_id))

    def revoke_client(self, job_id: str, client: int) -> None:
        """Revoke a client's token; raises ClientNotFound if the job has no such client."""
        self._driver.run(federation.revoke(self._flows, job_id, client))

    def join(
        self,
        job_id: str,
        data: str | PathLike[str],
        *,
        on_round: Callable[[str], None] | None = None,
    ) -> views.JobState:
        """Take part in a federated job as a client outside of its cluster, with a client's token,
        until the job ends; returns the job's last state.

        data: a table with the columns of the job's data, or for images a folder with a folder for
        each class. Nothing of it is sent: an update of the model, numbers of samples and mean
        losses are. on_round: called with a sentence about each round. A client that was stopped
        may call again at any time. Raises ImportError if the packages of `dray[client]` are
        missing, ValueError if the data do not fit the job, Unauthorized once the token is revoked.
        """
        with tempfile.TemporaryDirectory(prefix="dray-client-") as folder:
            make_trainer = trainer_of(Path(folder), data)
            tell = on_round or (lambda _sentence: None)
            flow = federation.join(self._flows, job_id, Path(folder), make_trainer, tell)
            return self._driver.run(flow)


class AsyncFederationCalls(AsyncCalls):
    """See `FederationCalls`, which has the same arguments, answers and errors."""

    async def invite_clients(self, job_id: str, clients: int = 1) -> list[views.Invitation]:
        return await self._driver.run(federation.invite(self._flows, job_id, clients))

    async def federated_clients(self, job_id: str) -> views.FederatedClientPage:
        return await self._driver.run(federation.clients(self._flows, job_id))

    async def revoke_client(self, job_id: str, client: int) -> None:
        await self._driver.run(federation.revoke(self._flows, job_id, client))

    async def join(
        self,
        job_id: str,
        data: str | PathLike[str],
        *,
        on_round: Callable[[str], None] | None = None,
    ) -> views.JobState:
        with tempfile.TemporaryDirectory(prefix="dray-client-") as folder:
            make_trainer = trainer_of(Path(folder), data)
            tell = on_round or (lambda _sentence: None)
            flow = federation.join(self._flows, job_id, Path(folder), make_trainer, tell)
            return await self._driver.run(flow)
