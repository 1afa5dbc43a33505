"""Generated texts and numbers that enter a server one way leave it unchanged in every other way.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1 pytest tests/generated/names` draws one case again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generated.names import around, sweeps, trials
from tests.generated.names.conftest import seeds, sweep_seeds
from tests.generated.names.doors import entered
from tests.generated.names.drawing import Case, Draw
from tests.generated.names.exits import Readers
from tests.generated.names.sites import Sites
from tests.generated.names.smaller import pass_or_show, smaller
from tests.seeds import noted

BLOCKS = 4
"""Number of tests that share the seeds."""


def goes_through(sites: Sites, folder: Path, case: Case) -> None:
    with entered(sites, folder, case) as doors:
        job_id = doors.submit()
        around.queue_is_counted(doors)
        doors.run(job_id)
        Readers(doors, job_id).check()
        around.queue_is_shown(doors)
        around.owner_is_noted(doors, job_id)
        around.hook_is_asked(doors, job_id)
        around.run_is_written(doors, job_id)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_what_goes_in_comes_out(block: int, sites: Sites, tmp_path: Path) -> None:
    for seed in noted(seeds()[block::BLOCKS]):
        case = Draw(seed).case()
        pass_or_show(seed, case, lambda one: goes_through(sites, tmp_path, one), smaller)


def test_parameters_of_sweeps_go_through_to_the_trials(sites: Sites, tmp_path: Path) -> None:
    for seed in noted(sweep_seeds()):
        case = sweeps.SweepDraw(seed).sweep()
        pass_or_show(
            seed, case, lambda one: trials.go_through(sites, tmp_path, one), sweeps.smaller
        )
