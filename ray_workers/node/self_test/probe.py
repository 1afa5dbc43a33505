"""The process that tests one device: `python -m ray_workers.node.self_test.probe KIND PARENT`.

KIND is `list`, which lists the node's GPUs; a device of torch, such as `cuda:0` or `cpu`; or
`group`, which tests the connections between all visible GPUs. For each line with the name of a step
on its standard input, the process writes a line of JSON: `{"ok": ...}`, `{"wrong": message}` if the
device returned a wrong value, or `{"error": message}` if the step could not be run.

A sick GPU can hang in any call. The process that started this process therefore limits the time of
each step, and kills this process. This process ends with its parent, the node's agent, and at the
latest after `LIFETIME_S`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ray_workers.shared.processes.linux import PR_SET_PDEATHSIG, prctl

LIFETIME_S = 180

Steps = Mapping[str, Callable[[], Any]]


def main(kind: str, parent: int) -> None:
    """Run the steps that the parent requests. Returns when standard input is closed."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before this process asked to die with it
        return
    signal.alarm(LIFETIME_S)
    # Libraries print to standard output, so keep it for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(steps_of(kind), sys.stdin, answers)


def serve(steps: Steps, requests: Any, answers: Any) -> None:
    from ray_workers.node.self_test.measures import Mismatch

    for line in requests:
        try:
            answer = {"ok": steps[line.strip()]()}
        except Mismatch as error:
            answer = {"wrong": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def steps_of(kind: str) -> Steps:
    if kind == "list":
        return {"list": _list}
    if kind == "group":
        return {"begin": _begin_group, "peers": _peers, "all_reduce": _all_reduce}
    return device_steps(kind)


def _list() -> list[dict[str, Any]] | None:
    """Return the GPUs of the node; None without an NVIDIA driver."""
    from ray_workers.node.gpu_memory import load_nvml

    nvml = load_nvml()
    return None if nvml is None else list_gpus(nvml)


def list_gpus(nvml: Any) -> list[dict[str, Any]]:
    """Return the GPUs: `index`, `uuid`, `model`, and `pids` of the processes that use the GPU. If a
    GPU can't be used as a whole, `error` states why."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu: dict[str, Any] = {"index": index, "uuid": f"index {index}", "model": "", "pids": []}
        found.append(gpu)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu["uuid"], gpu["model"] = map(
                _text, (nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle))
            )
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            gpu["pids"] = [process.pid for process in running]
        except nvml.NVMLError as error:
            gpu["error"] = f"NVML: {error}"
            continue
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0]:
                gpu["error"] = "the GPU is divided (Multi-Instance GPU)"
        except nvml.NVMLError:  # this model can't be divided
            pass
    return found


def device_steps(kind: str) -> Steps:
    """Return the steps for one device."""
    if kind == "cpu":
        return {"begin": _begin_cpu, "product": _processors}
    return {
        "begin": lambda: _begin(kind),
        "product": lambda: _product(kind),
        "memory": lambda: _memory(kind),
        "copies": lambda: _copies(kind),
    }


def _begin_cpu() -> dict[str, str]:
    from ray_workers.node.self_test import measures  # torch takes a second to import

    assert measures
    return {"alike": "cpu"}


def _processors() -> dict[str, Any]:
    from ray_workers.node.self_test import measures

    return {"values": {"product_s": measures.processors()}}


def _begin(kind: str) -> dict[str, str]:
    """Import torch, and create the device's context. `alike` is the same for all devices whose
    results must be equal."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device=kind)
    if not kind.startswith("cuda"):
        return {"alike": kind}
    properties = torch.cuda.get_device_properties(kind)
    capability = f"{properties.major}.{properties.minor}"
    return {"alike": f"{properties.name} {capability} {properties.multi_processor_count}"}


def _sizes(kind: str) -> Any:
    from ray_workers.node.self_test import measures

    return measures.WorkSizes() if kind.startswith("cuda") else measures.SMALL


def _product(kind: str) -> dict[str, Any]:
    import torch

    from ray_workers.node.self_test import measures

    hashed, seconds = measures.product(torch.device(kind), _sizes(kind))
    return {"hash": hashed, "values": {"product_s": seconds}}


def _memory(kind: str) -> dict[str, Any]:
    import torch

    from ray_workers.node.self_test import measures

    device = torch.device(kind)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 * measures.MEBIBYTE
    rate = measures.memory(device, free, _sizes(kind))
    return {"values": {"memory_bytes_per_s": rate}}


def _copies(kind: str) -> dict[str, Any]:
    import torch

    from ray_workers.node.self_test import measures

    to, back = measures.host_copies(torch.device(kind), _sizes(kind))
    return {"values": {"to_device_bytes_per_s": to, "from_device_bytes_per_s": back}}


def _gpus() -> list[Any]:
    import torch

    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _begin_group() -> dict[str, str]:
    import torch

    for device in _gpus():
        torch.zeros(1, device=device)
    return {"alike": ""}


def _peers() -> dict[str, Any]:
    """Return the rates in the order of the visible GPUs."""
    from ray_workers.node.self_test import measures

    return {"rates": measures.peer_copies(_gpus(), measures.WorkSizes())}


def _all_reduce() -> dict[str, Any]:
    from torch.cuda import nccl

    from ray_workers.node.self_test import measures

    return {"rate": measures.all_reduce(_gpus(), measures.WorkSizes(), nccl.all_reduce)}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
