"""A drawn program as a script: its beginning, and what it imports `train` from."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

FROM_DRAY = """from dray import train
BACKWARD = torch.Tensor.backward
def resumed(epoch):
    return 0  # prepare() finds the batch"""
FROM_REFERENCE = """from tests.generated.programs.reference import ReferenceTrain
train = ReferenceTrain()
BACKWARD, resumed = train.backward, train.resumed"""
NOISY = {"dropout", "noise", "shuffle", "unseeded"}
"""Features by which a program draws random numbers, so that only dray's runs are comparable."""
CHANGED_LATER = {"parameter_added", "layer_replaced"}
"""Features that give an optimizer other parameters in the middle of the training."""

_HEAD = """
    import copy, itertools, multiprocessing, os, sys
    import torch
    from torch import nn
    from torch.nn import functional
    {imports}

    OUT = {out!r}
    DEVICE = {device!r}
    KILLS = {kills!r}  # [rank, incarnation, batch, point]
    RANK = int(os.environ.get("RANK", "0"))
    multiprocessing.current_process()._config.update(daemon=False)  # for workers of loaders
    at = {{"place": -1}}

    def point(number):
        '''A named point, at which a rank may die.'''
        me = [RANK, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))]
        if os.environ.get("DRAY_ATTEMPT") == "1" and [*me, at["place"], number] in KILLS:
            os.kill(os.getpid(), 9)

    def exit_code_of_child(code):
        '''Of a process that the script forks.'''
        child = os.fork()
        if not child:
            sys.exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def on_cpu(state):
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, state)

    class Kept:
        '''State of the script's own.'''
        def __init__(self, **values):
            self.values = values
        def state_dict(self):
            return dict(self.values)
        def load_state_dict(self, values):
            self.values = copy.deepcopy(dict(values))

    class OwnOrder(torch.utils.data.Sampler):
        '''Every sample, in another order in each epoch.'''
        epoch = 0
        def set_epoch(self, epoch):
            self.epoch = epoch
        def __len__(self):
            return len(x)
        def __iter__(self):
            return iter([(7 * n + self.epoch) % len(x) for n in range(len(x))])

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.gain = nn.Parameter(torch.ones(1))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        def forward(self, values):
            if self.training:
                self.calls += 1
            return values + self.gain * torch.tanh(self.inner(values))

    torch.set_default_dtype(torch.{dtype})
    train.init(seed=3, checkpoint_every_s=None, checkpoint_every_steps={every})
    {seeding}
    x = torch.randn({samples}, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, {loader})
"""


@dataclass(frozen=True)
class DrawnProgram:
    """A program, and the choices with which it was generated."""

    seed: int
    body: str
    features: frozenset[str]
    num_points: int
    samples: int
    loader: str
    """The arguments of the loader."""

    @property
    def is_noisy(self) -> bool:
        return bool(self.features & NOISY)

    @property
    def is_alike_alone(self) -> bool:
        """Whether the number of ranks makes no difference except for rounding."""
        apart = {"batchnorm", "bf16", "block", "uneven_accumulation"}
        return not self.is_noisy and not self.features & apart

    @property
    def may_be_on_gpu(self) -> bool:
        """Whether all tensors of the program are on one device."""
        bound = {"scaler", "bf16", "own_checkpoint", "tied_layers", "tied_models", "thawed", "ema"}
        bound |= {"gradient_hook"}  # to() makes new parameters of pretended ones
        return not self.is_noisy and not self.features & {*bound, *CHANGED_LATER}

    @property
    def resumes_itself(self) -> bool:
        """Whether its own checkpoints contain everything on which the next epochs depend."""
        missed = {"group_added", "counts_itself", *CHANGED_LATER, *NOISY}
        return "clean_epochs" in self.features and not self.features & missed

    def text(
        self,
        out: Path,
        imports: str,
        *,
        kills: list[list[int]] | None = None,
        every: int | None = None,
        device: str = "cpu",
    ) -> str:
        head = textwrap.dedent(_HEAD).format(
            out=str(out),
            kills=kills or [],
            imports=imports,
            dtype="float32" if "bf16" in self.features else "float64",
            seeding="" if "unseeded" in self.features else "torch.manual_seed(0)",
            samples=self.samples,
            loader=self.loader,
            every=every,
            device=device,
        )
        return head + self.body
