"""Generated files: compares what dray reads with what was written.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1 pytest tests/generated/files` reads one case of each kind again.
"""

from __future__ import annotations

import pprint
from collections.abc import Callable

import pytest

from tests.generated.files import (
    arrays,
    csv_drawing,
    image_sets,
    links,
    parquet_files,
    rare_tables,
    texts,
)
from tests.generated.files.cases import Case, fault_in, smallest
from tests.generated.files.conftest import seeds
from tests.seeds import noted

KINDS: dict[str, Callable[[int], Case]] = {
    "arrays": arrays.draw,
    "csv": csv_drawing.draw,
    "images": image_sets.draw,
    "links": links.draw,
    "parquet": parquet_files.draw,
    "rare tables": rare_tables.draw,
    "texts": texts.draw,
}
BLOCKS = 4
"""Number of tests of each kind that share the seeds."""


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_as_they_were_written(kind: str, block: int) -> None:
    for seed in noted(seeds()[block::BLOCKS]):
        case = KINDS[kind](seed)
        if fault_in(case) is not None:
            small = smallest(case)
            shown = pprint.pformat(small, width=100)
            pytest.fail(f"{kind}, seed {seed}: {fault_in(small)}\n{shown}", pytrace=False)
