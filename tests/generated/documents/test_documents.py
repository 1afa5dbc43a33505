"""Generated documents pass through the whole service.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1 pytest tests/generated/documents` follows one document again.
"""

from __future__ import annotations

import copy
import pprint
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dray import views
from tests.generated.documents.bases import BASES
from tests.generated.documents.conftest import seeds
from tests.generated.documents.drawing import Draw
from tests.generated.documents.way import Followed, named
from tests.marks import SOAK
from tests.seeds import noted
from tests.unit.service.loops.world import World

BLOCKS = 4
"""Number of tests that share the seeds."""
pytestmark = pytest.mark.anyio


@pytest.fixture
async def followed(sqlite_url: str, tmp_path: Path) -> AsyncIterator[Followed]:
    world = World(sqlite_url, tmp_path)
    yield await Followed.open(world)
    await world.close()


@pytest.mark.parametrize("block", range(BLOCKS))
async def test_a_document_is_refused_by_field_or_launched_as_it_says(
    block: int, followed: Followed
) -> None:
    for seed in noted(seeds()[block::BLOCKS]):
        draw = Draw(seed)
        document = draw.document()
        try:
            await followed.follow(document)
            changed, pointer = draw.mutated(document)
            answer = await followed.submit(changed)
            assert not isinstance(answer, views.Job), f"{pointer} can't be right"
            named(changed, answer)
        except Exception:
            print(f"seed {seed}:\n{pprint.pformat(document, width=100)}")
            raise


@SOAK
async def test_the_documents_to_draw_from_are_launched_as_they_are(followed: Followed) -> None:
    for base in BASES:
        given = copy.deepcopy(base)
        answer = await followed.submit(given)
        assert isinstance(answer, views.Job), (base, answer)
        assert await followed.follow(given) == "launched"
