"""Watches the node's GPUs for faults through NVIDIA's management library (NVML).

Xid errors arrive as events; the other faults are read every few seconds. A call to NVML might never
return after the driver has lost a GPU, so a separate thread makes all calls, and readers get the
faults that have been found so far.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ray_workers.node.gpu_memory import load_nvml
from ray_workers.node.session_records import SessionRecord
from ray_workers.node.xids import PROGRAM_XIDS, SICK_XIDS
from ray_workers.shared.gpu_faults import GpuFault

LOOK_S = 5.0
"""Seconds between two readings of the counters."""
THROTTLED_S = 60.0
"""Seconds for which a GPU must be slowed down by heat or missing power before this is a fault."""
EVENT_WAIT_MS = 1000

# Constants of nvml.h. Older bindings don't name all of them.
XID_CRITICAL = 0x8
UNCORRECTED, VOLATILE = 1, 0
RECOVERY_ERRORS = 1
MOST_LINKS = 36
INVALID_ARGUMENT, NOT_SUPPORTED, GPU_IS_LOST, RESET_REQUIRED = 2, 3, 15, 16
THROTTLES: Mapping[int, str] = {
    0x08: "a slowdown by the hardware",
    0x20: "a thermal slowdown by the driver",
    0x40: "a thermal slowdown by the hardware",
    0x80: "the external power brake",
}
"""Reasons for lower clocks that are faults of the machine. The power cap (0x4) is normal."""


@dataclass
class _Gpu:
    index: int
    handle: Any
    uuid: str
    is_registered: bool = False
    """Whether the GPU's Xid errors are in the set of events."""
    was_active: set[int] = field(default_factory=set)
    """NVLinks that were active in an earlier reading."""
    recoveries: int | None = None
    """The NVLinks' recovery errors in the last reading."""
    throttled_since: float | None = None


class GpuWatch:
    """Finds faults. Not thread-safe, except for `faults`.

    A fault with a state, such as a pending remapping, is reported while the state lasts. An Xid
    error is reported until a newer occurrence of the same error replaces it.
    """

    def __init__(
        self,
        nvml: Any,
        records: Callable[[], Iterable[SessionRecord]],
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`records` returns the node's session records. `path` is the file that keeps the faults
        when the agent restarts."""
        self._nvml = nvml
        self._records = records
        self._path = path
        self._clock = clock
        self._faults = {(fault.gpu, fault.code): fault for fault in _stored(path)}
        self._gpus = self._found()
        self._events = self._new_events()

    @property
    def faults(self) -> tuple[GpuFault, ...]:
        return tuple(self._faults.values())

    def step(self, timeout_ms: int = EVENT_WAIT_MS) -> None:
        """Wait for an Xid error for at most `timeout_ms`."""
        if not any(gpu.is_registered for gpu in self._gpus):  # NVML would not wait
            time.sleep(timeout_ms / 1000)
            return
        try:
            event = self._nvml.nvmlEventSetWait(self._events, timeout_ms)
        except self._nvml.NVMLError:  # usually NVML_ERROR_TIMEOUT
            return
        if event.eventType & XID_CRITICAL:
            self._add_xid(self._of_handle(event.device), int(event.eventData))

    def look(self) -> None:
        """Read the state of all GPUs once."""
        self._register()
        for gpu in self._gpus:
            checks = (self._ecc, self._remapping, self._throttling, self._links)
            errors = [self._error_of(gpu, check) for check in checks]
            for code, error, message in (
                ("lost", GPU_IS_LOST, "NVML reports that the GPU is lost"),
                ("reset_required", RESET_REQUIRED, "NVML reports that the GPU must be reset"),
            ):
                if error in errors:
                    self._set(gpu, code, message, mark=code)
                elif None in errors:
                    self._clear(gpu, code)

    def _error_of(self, gpu: _Gpu, check: Callable[[_Gpu], None]) -> int | None:
        """Run a check, and return NVML's error. Most errors, such as NOT_SUPPORTED, are no evidence
        for or against a fault."""
        try:
            check(gpu)
        except self._nvml.NVMLError as error:
            return int(error.value)
        return None

    def _ecc(self, gpu: _Gpu) -> None:
        count = self._nvml.nvmlDeviceGetTotalEccErrors(gpu.handle, UNCORRECTED, VOLATILE)
        if not count:
            self._clear(gpu, "ecc")
            return
        errors = "1 uncorrectable memory error" if count == 1 else f"{count} uncorrectable errors"
        self._set(gpu, "ecc", f"{errors} since the driver was loaded", mark=str(count))

    def _remapping(self, gpu: _Gpu) -> None:
        rows = self._nvml.nvmlDeviceGetRemappedRows(gpu.handle)
        _corrected, _uncorrected, pending, failed = rows
        for code, is_set, message in (
            ("remap_pending", pending, "rows of memory are remapped at the next reset of the GPU"),
            ("remap_failed", failed, "a row of memory could not be remapped"),
        ):
            if is_set:
                self._set(gpu, code, message, mark=code)
            else:
                self._clear(gpu, code)

    def _throttling(self, gpu: _Gpu) -> None:
        active = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu.handle)
        reasons = [sentence for bit, sentence in THROTTLES.items() if active & bit]
        if not reasons:
            gpu.throttled_since = None
            self._clear(gpu, "throttled")
            return
        now = self._clock()
        if gpu.throttled_since is None:
            gpu.throttled_since = now
        if now - gpu.throttled_since >= THROTTLED_S:
            message = f"slow for more than {THROTTLED_S:g} s: {', '.join(reasons)}"
            self._set(gpu, "throttled", message, mark="throttled")

    def _links(self, gpu: _Gpu) -> None:
        active, recoveries, num_answers = set(), 0, 0
        for link in range(MOST_LINKS):
            try:
                is_active = self._nvml.nvmlDeviceGetNvLinkState(gpu.handle, link)
            except self._nvml.NVMLError as error:
                if error.value == INVALID_ARGUMENT and num_answers:  # there are no further links
                    break
                if error.value == NOT_SUPPORTED:  # this link does not exist
                    continue
                raise
            num_answers += 1
            if is_active:
                active.add(link)
                recoveries += self._recoveries(gpu, link)
        if not num_answers:
            raise self._nvml.NVMLError(NOT_SUPPORTED)
        lost = sorted(gpu.was_active - active)
        gpu.was_active |= active
        if lost:
            names = ", ".join(map(str, lost))
            self._set(gpu, "nvlink_lost", f"NVLink {names} is no longer active", mark=names)
        elif gpu.was_active:
            self._clear(gpu, "nvlink_lost")
        before, gpu.recoveries = gpu.recoveries, recoveries
        if before is not None and recoveries > before and not lost:
            message = f"{recoveries - before} NVLink recovery errors within {LOOK_S:g} s"
            self._set(gpu, "nvlink_errors", message, mark=repr(self._clock()))

    def _recoveries(self, gpu: _Gpu, link: int) -> int:
        ask = self._nvml.nvmlDeviceGetNvLinkErrorCounter
        try:
            return int(ask(gpu.handle, link, RECOVERY_ERRORS))
        except self._nvml.NVMLError as error:
            if error.value == NOT_SUPPORTED:
                return 0
            raise

    def _add_xid(self, gpu: _Gpu, xid: int) -> None:
        mark = repr(self._clock())
        if xid in SICK_XIDS:
            self._set(gpu, f"xid_{xid}", f"Xid {xid}: {SICK_XIDS[xid]}", mark=mark)
            return
        meaning = PROGRAM_XIDS.get(xid)
        message = f"Xid {xid}" if meaning is None else f"Xid {xid}: {meaning}"
        why = "usually caused by the program" if meaning else "see NVIDIA's catalog of Xid errors"
        self._set(gpu, f"xid_{xid}", f"{message} ({why})", mark=mark, is_sick=False)

    def _set(self, gpu: _Gpu, code: str, message: str, *, mark: str, is_sick: bool = True) -> None:
        key = (gpu.uuid, code)
        before = self._faults.get(key)
        if before is not None and before.mark == mark:
            return
        named = f"GPU {gpu.index}: {message}" if gpu.index >= 0 else f"an unknown GPU: {message}"
        jobs = tuple(sorted(self._jobs_on(gpu)))
        count = 1 if before is None else before.count + 1
        fault = GpuFault(gpu.uuid, code, named, mark, self._clock(), is_sick, jobs, count)
        self._faults = {**self._faults, key: fault}
        self._store()
        print(f"fault of a GPU: {fault}", flush=True)  # noqa: T201

    def _clear(self, gpu: _Gpu, code: str) -> None:
        key = (gpu.uuid, code)
        if key in self._faults:
            self._faults = {other: fault for other, fault in self._faults.items() if other != key}
            self._store()

    def _jobs_on(self, gpu: _Gpu) -> set[tuple[str, int]]:
        return {
            (record.job_id, record.attempt)
            for record in self._records()
            if record.job_id and record.is_of_this_boot
            if any(self._is_on(gpu, name) for name in record.gpu_names)
        }

    def _is_on(self, gpu: _Gpu, name: str) -> bool:
        """Whether a name in CUDA_VISIBLE_DEVICES denotes the GPU, or a part (MIG) of the GPU."""
        if name.isdecimal():
            return int(name) == gpu.index
        if not name.startswith("MIG-"):
            return gpu.uuid.startswith(name)
        try:
            part = self._nvml.nvmlDeviceGetHandleByUUID(name)
            whole = self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
            return bool(_text(self._nvml.nvmlDeviceGetUUID(whole)) == gpu.uuid)
        except self._nvml.NVMLError:
            return False

    def _found(self) -> list[_Gpu]:
        gpus = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(_Gpu(index, handle, _text(self._nvml.nvmlDeviceGetUUID(handle))))
            except self._nvml.NVMLError as error:
                if error.value == GPU_IS_LOST:
                    gone = _Gpu(index, None, f"index {index}")
                    self._set(gone, "lost", "NVML reports that the GPU is lost", mark="lost")
        return gpus

    def _new_events(self) -> Any:
        """Return a set of events; None if the driver has no events."""
        try:
            return self._nvml.nvmlEventSetCreate()
        except self._nvml.NVMLError:
            return None

    def _register(self) -> None:
        """Add the GPUs that NVML has not accepted yet to the set of events."""
        for gpu in self._gpus:
            if self._events is not None and not gpu.is_registered:
                with contextlib.suppress(self._nvml.NVMLError):
                    ask = self._nvml.nvmlDeviceRegisterEvents
                    ask(gpu.handle, XID_CRITICAL, self._events)
                    gpu.is_registered = True

    def _of_handle(self, handle: Any) -> _Gpu:
        try:
            uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
            same = [gpu for gpu in self._gpus if gpu.uuid == uuid]
        except self._nvml.NVMLError:  # the GPU is lost, but the handle is still the same
            same = [gpu for gpu in self._gpus if _address(gpu.handle) == _address(handle)]
        return same[0] if same else _Gpu(-1, handle, "unknown")

    def _store(self) -> None:
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps([asdict(fault) for fault in self.faults]))
        draft.replace(self._path)


class GpuHealth:
    """Runs a `GpuWatch` in a thread, if the node has an NVIDIA driver."""

    def __init__(
        self,
        records: Callable[[], Iterable[SessionRecord]],
        path: Path,
        load: Callable[[], Any] = load_nvml,
    ) -> None:
        self._records, self._path, self._load = records, path, load
        self._watch: GpuWatch | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread on the first call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpu health", daemon=True)
            self._thread.start()

    def faults(self) -> tuple[GpuFault, ...]:
        """Return the known faults, without waiting for NVML."""
        return _stored(self._path) if self._watch is None else self._watch.faults

    def _run(self) -> None:
        nvml = self._load()
        if nvml is None:
            return
        due = time.monotonic()
        while True:
            try:
                self._watch = self._watch or GpuWatch(nvml, self._records, self._path)
                if time.monotonic() >= due:
                    self._watch.look()
                    due = time.monotonic() + LOOK_S
                self._watch.step()
            except Exception:  # a full disk or an unexpected answer must not end the watch
                traceback.print_exc()
                time.sleep(LOOK_S)


def _stored(path: Path) -> tuple[GpuFault, ...]:
    try:
        found = [GpuFault(**one) for one in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return ()
    return tuple(replace(f, jobs=tuple((job, attempt) for job, attempt in f.jobs)) for f in found)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _address(handle: Any) -> Any:
    """Return the address that a handle of the bindings contains."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value
    except ctypes.ArgumentError:
        return id(handle)
