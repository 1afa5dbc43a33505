"""Drawn texts and numbers go in by a door of the server, and come out of all others as they were.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1 pytest tests/generated/names` draws one case again.
"""

from __future__ import annotations

import copy
import pprint
from pathlib import Path

import pytest

from tests.generated.names.conftest import seeds
from tests.generated.names.doors import Doors
from tests.generated.names.drawing import Draw
from tests.generated.names.exits import Readers
from tests.unit.api.serving import LiveServer

BLOCKS = 4
"""Tests that share the seeds."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_what_goes_in_comes_out(
    block: int, server: LiveServer, readers: Readers, tmp_path: Path
) -> None:
    doors = Doors(server, tmp_path)
    for seed in seeds()[block::BLOCKS]:
        case = Draw(seed).case()
        given = copy.deepcopy(case)
        try:
            readers.check(doors.put(case), case)
        except Exception:
            print(f"seed {seed}:\n{pprint.pformat(given, width=100)}")
            print(f"taken:\n{pprint.pformat(case, width=100)}")
            raise
