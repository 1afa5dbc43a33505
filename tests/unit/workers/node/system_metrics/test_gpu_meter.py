"""GPUs of a made-up NVML, which may also not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ray_workers.node.system_metrics import gpus
from ray_workers.node.system_metrics.gpus import GIVEN_UP_S, MAX_AGE_S, GpuMeter

PATIENCE_S = 10.0
SHOWN = {"utilization": 0.5, "memory_used": 7e9, "power_w": 250.5, "temperature_c": 61.0}


class TwoGpus:
    """Two GPUs, the second of which can't measure its power."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.num_reads = 0

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        self.answers.wait(PATIENCE_S)
        self.num_reads += 1
        if index > 1:
            raise self.NVMLError
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return name

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> Any:  # noqa: N802
        return SimpleNamespace(used=7_000_000_000)

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:  # noqa: N802
        if gpu == "GPU-1":
            raise self.NVMLError
        return 250_500

    def nvmlDeviceGetTemperature(self, gpu: str, sensor: int) -> int:  # noqa: N802
        return 61


@pytest.fixture
def nvml() -> Iterator[TwoGpus]:
    nvml = TwoGpus()
    yield nvml
    nvml.answers.set()


def meter_of(nvml: TwoGpus, now: list[float], wait_s: float = PATIENCE_S) -> GpuMeter:
    return GpuMeter(lambda: nvml, wait_s=wait_s, clock=lambda: now[0])


def test_gpus_are_read_by_index_and_by_uuid_as_far_as_they_know(nvml: TwoGpus) -> None:
    meter = meter_of(nvml, [0.0])
    without_power = {name: value for name, value in SHOWN.items() if name != "power_w"}
    assert meter.read({"0", "1"}) == {"0": SHOWN, "1": without_power}
    assert meter.read({"GPU-0"}) == {"GPU-0": SHOWN}
    assert meter.read({"7"}) == {"7": {}}, "there is no such GPU"


def test_an_answer_that_is_no_number_is_left_out_and_ends_no_thread(
    nvml: TwoGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = meter_of(nvml, [0.0])
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda _: SimpleNamespace(used=None))
    without_memory = {name: value for name, value in SHOWN.items() if name != "memory_used"}
    assert meter.read({"0"}) == {"0": without_memory}
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByUUID", Mock(side_effect=UnicodeError))
    assert meter.read({"GPU-ä"}) == {"GPU-ä": {}}
    assert meter.read({"0"}) == {"0": without_memory}


def test_nothing_is_asked_without_gpus_and_without_nvml(nvml: TwoGpus) -> None:
    assert meter_of(nvml, [0.0]).read(()) == {}
    loads = []
    meter = GpuMeter(lambda: loads.append(1), wait_s=PATIENCE_S)
    assert meter.read({"0"}) == meter.read({"0"}) == {}
    assert loads == [1]


def test_a_call_that_hangs_delays_no_reader_and_begins_no_other(
    nvml: TwoGpus, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    meter = meter_of(nvml, now, wait_s=0.01)
    while not meter.read({"0"}):
        pass  # on a slow machine the first answer may arrive late
    num_threads = threading.active_count()
    nvml.answers.clear()
    now[0] = 1.0
    assert meter.read({"0"}) == {"0": SHOWN}, "the last values, which are recent"
    now[0] = MAX_AGE_S + 2.0
    for _ in range(3):
        assert meter.read({"0"}) == {}, "what is old is not passed on"
    now[0] = GIVEN_UP_S + 2.0
    assert meter.read({"0"}) == meter.read({"0"}) == {}
    assert capsys.readouterr().out.count("NVML does not respond") == 1
    assert threading.active_count() == num_threads
    nvml.answers.set()
    while not meter.read({"0"}):
        pass  # it continues once the call returns


def test_a_meter_is_not_asked_twice_while_it_is_busy(nvml: TwoGpus) -> None:
    meter = meter_of(nvml, [0.0])
    found: list[Any] = []
    names = ["0", "1", "0", "1"]
    threads = [threading.Thread(target=lambda n=n: found.append(meter.read({n}))) for n in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for one in found for name in one) == sorted(names)
    assert nvml.num_reads == len(names)


def test_the_wait_for_an_answer_is_short() -> None:
    assert gpus.WAIT_S <= 0.5
