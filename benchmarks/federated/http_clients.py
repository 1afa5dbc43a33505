"""Many federated clients in one process, which send all requests of real clients but do not
train."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np

from dray.views import FederatedRound, RoundPhase

WAIT_S = 30.0
SIZE_OF_UPDATE = 1e-4


@dataclass
class Swarm:
    """The clients of one job, each with its token."""

    url: str
    job_id: str
    tokens: Sequence[str]
    polls: int = 0
    sent: int = 0
    refused: int = 0
    """Number of 409 responses, because the round was over."""
    states: list[str] = field(default_factory=list)

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        await asyncio.gather(*map(self._take_part, self.tokens))

    async def _take_part(self, token: str) -> None:
        """Run one client. Each has a separate connection pool, because httpx searches all
        connections of a pool for each request."""
        base_url = f"{self.url}/v1/federated/{self.job_id}"
        timeout = httpx.Timeout(30.0, read=2 * WAIT_S)
        async with httpx.AsyncClient(
            base_url=base_url, timeout=timeout, trust_env=False, verify=False
        ) as http:
            await self._play(http, {"Authorization": f"Bearer {token}"})

    async def _play(self, http: httpx.AsyncClient, headers: dict[str, str]) -> None:
        while True:
            response = await http.get(f"/round?wait_s={WAIT_S:g}", headers=headers)
            response.raise_for_status()
            self.polls += 1
            view = FederatedRound.model_validate_json(response.content)
            if view.phase is RoundPhase.OVER:
                self.states.append(view.job_state)
                return
            if view.phase is RoundPhase.OPEN:
                await self._send(http, headers, view)

    async def _send(
        self, http: httpx.AsyncClient, headers: dict[str, str], view: FederatedRound
    ) -> None:
        base, size = f"/rounds/{view.name}", view.num_elements or 0
        await http.get(f"{base}/model", headers=headers)
        update = np.full(size, SIZE_OF_UPDATE, dtype="<f4").tobytes()
        binary = {**headers, "Content-Type": "application/octet-stream"}
        part_bytes = view.part_bytes or 1
        for part in range(-(-len(update) // part_bytes)):
            content = update[part * part_bytes : (part + 1) * part_bytes]
            await http.put(f"{base}/parts/{part}", headers=binary, content=content)
        said = {"num_samples": 10, "num_steps": 1, "loss": 0.5}
        sha256 = hashlib.sha256(update).hexdigest()
        answer = await http.post(f"{base}/update", headers=headers, json={**said, "sha256": sha256})
        self.sent += answer.is_success
        self.refused += answer.status_code == 409
