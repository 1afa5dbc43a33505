"""Faults of GPUs are found, on drawn histories, as a slow second implementation finds them."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ray_workers.node import compat_ray
from ray_workers.node.gpu_health import GpuHealth, GpuWatch
from ray_workers.node.session_records import SessionRecord
from tests.fakes import pretend_nvml
from tests.fakes.pretend_nvml import PretendGpu, PretendNvml
from tests.unit.workers.node.test_orphans import record

SICK = {46, 48, 54, 62, 64, 74, 79, 94, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158}
FAULTY_CLOCKS = {0x08, 0x20, 0x40, 0x80}


@dataclass
class Lab:
    """A node with pretended GPUs."""

    path: Path
    nvml: PretendNvml
    records: list[SessionRecord] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.restart()
        self.watch.look()

    def restart(self) -> None:
        """Restart the node's agent."""
        self.watch = GpuWatch(self.nvml, lambda: self.records, self.path, clock=lambda: self.now)

    def run(self) -> set[tuple[str, str]]:
        """Let 5 s pass, and return (GPU, code) of the faults."""
        self.now += 5.0
        while self.nvml.xids:
            self.watch.step(0)
        self.watch.look()
        return {(fault.gpu, fault.code) for fault in self.watch.faults}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    gpus = [PretendGpu(f"GPU-{name}", links={0: True, 1: True}) for name in "ab"]
    return Lab(tmp_path / "faults.json", PretendNvml(*gpus))


def test_the_pretended_calls_are_those_of_the_bindings() -> None:
    bindings: Any = compat_ray.nvml()
    for name, pretended in inspect.getmembers(PretendNvml, inspect.isfunction):
        if name.startswith("nvml"):
            real = inspect.signature(getattr(bindings, name))
            ours = list(inspect.signature(pretended).parameters)[1:]
            assert len(real.parameters) == len(ours), name
    for code in ("INVALID_ARGUMENT", "NOT_SUPPORTED", "NOT_FOUND", "TIMEOUT", "GPU_IS_LOST"):
        assert getattr(bindings, f"NVML_ERROR_{code}") == getattr(pretend_nvml, code)
    assert bindings.NVML_ERROR_RESET_REQUIRED == pretend_nvml.RESET_REQUIRED
    assert bindings.nvmlEventTypeXidCriticalError == 8
    assert (bindings.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, bindings.NVML_VOLATILE_ECC) == (1, 0)
    assert bindings.NVML_NVLINK_ERROR_DL_RECOVERY == 1
    names = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    faulty = {getattr(bindings, f"nvmlClocksThrottleReason{name}") for name in names}
    assert faulty == FAULTY_CLOCKS


@pytest.mark.parametrize("seed", range(12))
def test_drawn_histories(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    gpus = [PretendGpu(f"GPU-{n}", links={0: True, 1: True}) for n in range(draw.randint(1, 4))]
    lab = Lab(tmp_path / "faults.json", PretendNvml(*gpus))
    xids: set[tuple[str, str]] = set()
    recoveries: set[tuple[str, str]] = set()
    held: dict[str, set[str]] = {gpu.uuid: set() for gpu in gpus}
    slow_since: dict[str, float] = {}
    seen_links: dict[str, set[int]] = {gpu.uuid: set() for gpu in gpus}
    counted: dict[str, int | None] = dict.fromkeys(held)
    for _ in range(80):
        gpu = draw.choice(gpus)
        match draw.randrange(9):
            case 0:
                gpu.ecc = draw.choice([0, gpu.ecc + 1])
            case 1:
                gpu.pending, gpu.failed = draw.randint(0, 1), draw.randint(0, 1)
            case 2:
                gpu.reasons = draw.choice([0, 1, 4, 8, 0x20, 0x44, 0x84, 0x80])
            case 3:
                gpu.links[draw.randint(0, 1)] = draw.random() < 0.7
            case 4:
                gpu.recoveries[0] = draw.choice([0, gpu.recoveries.get(0, 0) + 2])
            case 5:
                xid = draw.choice([13, 31, 43, 45, 48, 63, 79, 94, 109, 119])
                if gpu.uuid in lab.nvml.registered:
                    lab.nvml.fail(gpu, xid)
                    xids.add((gpu.uuid, f"xid_{xid}"))
            case 6:
                gpu.errors = {"*": draw.choice([3, 15, 16, 999])} if draw.random() < 0.5 else {}
            case 7:
                lab.restart()
                slow_since = {}
                seen_links = {name: set() for name in held}
                counted = dict.fromkeys(held)
        found = lab.run()
        for each in gpus:
            name, error = each.uuid, each.errors.get("*")
            if error is not None:
                held[name] |= {15: {"lost"}, 16: {"reset_required"}}.get(error, set())
                continue
            active = {link for link, is_active in each.links.items() if is_active}
            lost = bool(seen_links[name] - active)
            seen_links[name] |= active
            count = sum(each.recoveries.get(link, 0) for link in active)
            before, counted[name] = counted[name], count
            if before is not None and count > before and not lost:
                recoveries.add((name, "nvlink_errors"))
            is_slow = any(each.reasons & bit for bit in FAULTY_CLOCKS)
            began = slow_since.setdefault(name, lab.now)
            if not is_slow:
                del slow_since[name]
            now = {
                "ecc": each.ecc > 0,
                "remap_pending": each.pending > 0,
                "remap_failed": each.failed > 0,
                "throttled": is_slow and (lab.now - began >= 60 or "throttled" in held[name]),
                "nvlink_lost": lost or (not seen_links[name] and "nvlink_lost" in held[name]),
            }
            held[name] = {code for code, is_now in now.items() if is_now}
        states = {(name, code) for name, codes in held.items() for code in codes}
        assert found == states | xids | recoveries
        for fault in lab.watch.faults:
            number = fault.code.removeprefix("xid_")
            assert fault.is_sick is (not number.isdecimal() or int(number) in SICK)


def test_only_the_jobs_on_the_gpu_are_named(lab: Lab) -> None:
    lab.records = [
        record(job_id="by-index", gpus="0"),
        record(job_id="by-uuid", attempt=3, gpus="GPU-a"),
        record(job_id="neighbour", gpus="GPU-b"),
        record(job_id="of-an-earlier-boot", gpus="0", boot_id="x"),
        record(job_id="on-cpus"),
    ]
    lab.nvml.fail(lab.nvml.gpus[0], 79)
    lab.run()
    (fault,) = lab.watch.faults
    assert fault.jobs == (("by-index", 1), ("by-uuid", 3))
    assert fault.message == "GPU 0: Xid 79: the GPU has fallen off the bus"


def test_a_part_of_a_gpu_counts_as_the_gpu(lab: Lab) -> None:
    lab.nvml.gpus[1].parts = ["MIG-1", "MIG-2"]
    lab.records = [record(job_id="mig", gpus="MIG-2"), record(job_id="other", gpus="MIG-9")]
    lab.nvml.gpus[1].ecc = 1
    lab.run()
    (fault,) = lab.watch.faults
    assert (fault.gpu, fault.jobs) == ("GPU-b", (("mig", 1),))


def test_an_xid_of_a_gpu_that_has_no_uuid_any_more_is_that_of_its_handle(lab: Lab) -> None:
    lab.nvml.gpus[1].errors = {"*": 15, "nvmlDeviceGetUUID": 15}
    lab.nvml.fail(lab.nvml.gpus[1], 79)
    assert lab.run() == {("GPU-b", "xid_79"), ("GPU-b", "lost")}


def test_a_lost_gpu_is_found_when_the_agent_starts(lab: Lab) -> None:
    lab.nvml.gpus[0].errors = {"*": 15, "nvmlDeviceGetUUID": 15}
    lab.restart()
    assert lab.run() == {("index 0", "lost")}


def test_a_restarted_agent_reports_the_same_occurrence(lab: Lab) -> None:
    lab.nvml.fail(lab.nvml.gpus[0], 79)
    lab.nvml.gpus[1].ecc = 2
    lab.run()
    before = lab.watch.faults
    lab.restart()
    lab.run()
    assert lab.watch.faults == before
    health = GpuHealth(list, lab.path, load=lambda: None)
    assert health.faults() == before


def test_the_same_error_again_is_a_new_occurrence(lab: Lab) -> None:
    marks = []
    for _ in range(2):
        lab.nvml.fail(lab.nvml.gpus[0], 79)
        lab.nvml.gpus[1].ecc += 1
        lab.run()
        marks.append({fault.code: fault.mark for fault in lab.watch.faults})
    assert {fault.code: fault.count for fault in lab.watch.faults} == {"xid_79": 2, "ecc": 2}
    assert marks[0].keys() == marks[1].keys()
    assert all(marks[0][code] != marks[1][code] for code in ("xid_79", "ecc"))


def test_gpus_without_these_counters_have_no_faults(lab: Lab) -> None:
    for gpu in lab.nvml.gpus:
        gpu.errors = {"*": pretend_nvml.NOT_SUPPORTED}
    lab.restart()
    assert lab.run() == set()
