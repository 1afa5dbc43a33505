"""Each failure in the table of `docs/explanation/faults.md` is injected by tests."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "explanation" / "faults.md"
HEAD = "| failure | effect | lost steps | tested with |"
ON_GPUS = "unit/training/elastic/test_recovery_on_gpus.py"
DIVIDED_ON_GPUS = "unit/training/elastic/test_divided_recovery_on_gpus.py"
KILLS, CLUSTER = "integration/test_faults.py", "integration/test_cluster.py"

TESTS: dict[str, dict[str, str]] = {
    "the service": {KILLS: "test_a_killed_service_loses_nothing_and_the_training_goes_on"},
    "the process that holds the Ray driver": {
        KILLS: "test_a_killed_gateway_is_started_again_and_nothing_is_lost"
    },
    "a training process, a rank's actor, or a node with some": {
        KILLS: "test_a_killed_rank_is_replaced_and_no_step_is_lost",
        CLUSTER: "test_ranks_of_a_lost_node_get_slots_elsewhere_and_no_step_is_lost",
        "integration/test_prepared.py": "test_a_killed_rank_is_replaced_and_no_step_is_lost",
        ON_GPUS: "test_each_kind_of_group_on_gpus_replaces_a_lost_rank",
    },
    "a spare": {
        "unit/workers/supervision/test_spares.py": (
            "test_a_suspended_spare_is_killed_within_the_limit_and_replaced"
        ),
        "unit/training/elastic/test_spares.py": "test_a_spare_is_killed_while_it_takes_over",
    },
    "a hanging rank of a recipe": {
        "integration/test_hangs.py": (
            "test_a_stopped_rank_is_replaced_and_what_everyone_was_at_is_kept"
        )
    },
    "a process or a node of a recipe whose ranks divide a single": {
        "unit/training/parallel/test_peer_memory.py": "test_a_lost_node_costs_no_share",
        DIVIDED_ON_GPUS: "test_a_lost_rank_gets_its_share_from_another_rank",
    },
    "a node with some ranks of an elastic recipe": {
        "unit/training/elastic/test_divided_resizing.py": (
            "test_a_broken_replica_leaves_and_a_complete_one_joins"
        )
    },
    "an error that makes the GPU of a rank unusable": {
        ON_GPUS: "test_a_rank_that_can_not_use_its_gpu_is_replaced"
    },
    "a process of a single-rank job": {
        KILLS: "test_a_killed_supervisor_costs_only_the_way_back_to_the_checkpoint",
        "unit/training/test_pretend_gpu.py": (
            "test_a_rank_that_is_lost_ends_the_group_and_leaves_nothing_that_was_not_computed"
        ),
    },
    "a process of any other script": {
        KILLS: "test_a_script_resumes_from_what_it_saved_when_it_is_killed_and_when_it_is_preempted"
    },
    "a GPU with a fault that its driver reports": {
        "unit/service/nodes/test_withheld.py": (
            "test_a_fault_is_shown_and_told_once_to_the_job_on_the_gpu"
        ),
        "unit/service/nodes/test_node_checks.py": (
            "test_a_failure_withholds_the_node_until_an_admin_releases_it"
        ),
    },
    "a device that computes wrong values": {
        "unit/training/parallel/test_corrupted_replicas.py": (
            "test_what_a_plain_comparison_finds_is_found"
        )
    },
    "a node whose loss Ray has announced": {
        CLUSTER: "test_a_job_leaves_a_node_that_is_drained_and_resumes_where_it_was"
    },
    "no free disk space": {
        "unit/training/checkpoint/test_manager.py": (
            "test_a_full_disk_ends_the_checkpoint_and_not_the_job"
        ),
        "integration/test_bad_scripts.py": (
            "test_a_disk_that_takes_no_more_is_named_and_not_charged_to_the_program"
        ),
    },
    "the cluster": {KILLS: "test_a_lost_cluster_sends_its_jobs_back_to_the_queue_uncharged"},
}
"""Tests by file, keyed by the beginning of the failure's description."""


def failures() -> list[str]:
    _, _, table = PAGE.read_text().partition(f"{HEAD}\n")
    rows = table.partition("\n\n")[0].splitlines()[1:]
    return [row.removeprefix("| ") for row in rows]


def test_each_failure_is_injected_by_a_test() -> None:
    rows = failures()
    assert len(rows) == len(TESTS)
    for row, begin in zip(rows, TESTS, strict=True):
        assert row.startswith(begin)


def test_the_tests_that_inject_failures_exist() -> None:
    for tests in TESTS.values():
        for file, name in tests.items():
            tree = ast.parse((ROOT / "tests" / file).read_text())
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            assert name in {one.name for one in tree.body if isinstance(one, functions)}, file


def test_each_row_has_four_cells_and_states_what_is_lost_and_how_that_was_tested() -> None:
    for row in failures():
        *_, lost, tested, end = row.split("|")
        assert lost.strip().startswith(("none", "the steps since"))
        assert tested.strip().startswith(("CPU groups", "simulated"))
        assert not end
