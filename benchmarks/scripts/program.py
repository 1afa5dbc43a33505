"""The measured program: steps of a DDP model of a given size, run in the same way by torchrun.

    program.py STEPS SIZE

It prints when its first line ran, in Unix seconds, and at the end the milliseconds of each step of
rank 0, as JSON. If STEPS is 0, it prints only the former, before torch is imported.
"""

import json
import os
import sys
import time

print(json.dumps({"began": time.time()}), flush=True)

NUM_WARMUP = 5


def train(num_steps: int, size: int) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(size, size), nn.Linear(size, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(256, size)
    taken = []
    for _ in range(num_steps + NUM_WARMUP):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        taken.append((time.perf_counter() - began) * 1e3)
    dist.destroy_process_group()
    return taken[NUM_WARMUP:]


if __name__ == "__main__" and int(sys.argv[1]):
    steps = train(int(sys.argv[1]), int(sys.argv[2]))
    if os.environ["RANK"] == "0":
        print(json.dumps({"steps_ms": steps}), flush=True)
