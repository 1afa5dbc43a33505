"""Prepared scripts drawn at random: several models and optimizers, and passes as people write them.

The text of a program is run by dray's ranks, with kills at named points, and by ranks that average
gradients by hand (`plain_train`), which shares no code with dray.
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass
from pathlib import Path

EPOCH_BATCHES = 3
NUM_BATCHES = 2 * EPOCH_BATCHES
GLOBAL_BATCH = 7
"""Does not divide by 2 or 3, so the shares of the ranks are uneven."""
SAMPLES = 20
"""The last batch of the three of an epoch is short."""

_HEAD = """
    import copy, json, os
    import torch
    from torch import nn
    from torch.nn import functional
    {imports}

    OUT = {out!r}
    KILLS = {kills!r}  # incarnations that die: [rank, incarnation, batch, point]

    def point(number):
        '''A named point of the batch, at which a rank may die.'''
        me = [int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
        if os.environ.get("DRAY_ATTEMPT") == "1" and [*me, place, number] in KILLS:
            os.kill(os.getpid(), 9)

    torch.set_default_dtype(torch.float64)
    train.init(seed=3, checkpoint_every_s=None, checkpoint_every_steps={every})
    torch.manual_seed(0)
    x = torch.randn({samples}, 4)
    y = x.sum(1, keepdim=True)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size={batch}, shuffle=False)
"""


@dataclass(frozen=True)
class DrawnProgram:
    """A program and what it was drawn with."""

    seed: int
    body: str
    num_points: int
    draws_noise: bool
    """Whether it draws random numbers, so that only dray's own runs are alike."""

    def text(
        self,
        out: Path,
        kills: list[list[int]],
        imports: str = "from dray import train\nBACKWARD = torch.Tensor.backward",
        every: int | None = None,
    ) -> str:
        head = textwrap.dedent(_HEAD).format(
            out=str(out),
            kills=kills,
            imports=imports,
            samples=SAMPLES,
            batch=GLOBAL_BATCH,
            every=every,
        )
        return head + self.body


def draw(seed: int) -> DrawnProgram:
    """The program of this seed."""
    return _Drawing(random.Random(seed)).program(seed)


class _Drawing:
    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._num_models = dice.randint(1, 3)
        self._shares = self._num_models > 1 and dice.random() < 0.2
        """Whether one optimizer has the parameters of the first two models."""
        self._num_optimizers = self._num_models - self._shares
        self._points = 0
        self._draws_noise = False

    def _maybe(self, share: float) -> bool:
        return self._dice.random() < share

    def program(self, seed: int) -> DrawnProgram:
        lines = [*self._models(), *self._optimizers(), *self._preparing()]
        lines += ["for epoch in range(2):", "    for inputs, targets in loader:"]
        lines += ["        progress = train.progress()"]
        lines += [f"        place = progress.epoch * {EPOCH_BATCHES} + progress.batch"]
        lines += [f"        {line}" for line in self._batch()]
        state = ", ".join(
            [f"model{n}.state_dict()" for n in range(self._num_models)]
            + [f"optimizer{n}.state_dict()" for n in range(self._num_optimizers)]
        )
        lines += [f"torch.save([{state}], f'{{OUT}}/state-{{os.environ[\"RANK\"]}}.pt')"]
        return DrawnProgram(seed, "\n".join(lines) + "\n", self._points, self._draws_noise)

    def _models(self) -> list[str]:
        lines = []
        for number in range(self._num_models):
            middle = []
            if self._maybe(0.3):
                middle.append("nn.BatchNorm1d(5)")
            if self._maybe(0.15):
                middle.append("nn.Dropout(0.3)")
                self._draws_noise = True
            middle.append("nn.Tanh()")
            layers = f"nn.Linear(4, 5), {', '.join(middle)}, nn.Linear(5, 4)"
            lines.append(f"model{number} = nn.Sequential({layers})")
            if self._maybe(0.15):  # a parameter that no pass reaches
                lines.append(f"model{number}.unused = nn.Parameter(torch.zeros(2))")
            if self._maybe(0.15):
                lines.append(f"model{number}[0].bias.requires_grad_(False)")
        return lines

    def _optimizers(self) -> list[str]:
        kinds = ("SGD({p}, lr=0.05, momentum=0.9)", "AdamW({p}, lr=0.01)", "RMSprop({p}, lr=0.01)")
        lines = []
        for number in range(self._num_optimizers):
            of_models = [number + self._shares]
            if number == 0 and self._shares:
                of_models = [0, 1]
            listed = " + ".join(f"list(model{each}.parameters())" for each in of_models)
            kind = self._dice.choice(kinds).format(p=listed)
            lines.append(f"optimizer{number} = torch.optim.{kind}")
        self._scheduled = [n for n in range(self._num_optimizers) if self._maybe(0.3)]
        for number in self._scheduled:
            lines.append(
                f"scheduler{number} = torch.optim.lr_scheduler.StepLR(optimizer{number}, 2, 0.7)"
            )
        return lines

    def _preparing(self) -> list[str]:
        models = [f"model{n}" for n in range(self._num_models)]
        optimizers = [f"optimizer{n}" for n in range(self._num_optimizers)]
        tracked = "".join(f", scheduler{n}=scheduler{n}" for n in self._scheduled)
        if len(models) == len(optimizers) > 1 and self._maybe(0.3):
            first = f"_, _, loader = train.prepare(model0, optimizer0, loader{tracked})"
            others = [
                f"train.prepare({model}, {optimizer})"
                for model, optimizer in zip(models[1:], optimizers[1:], strict=True)
            ]
            return [first, *others]
        if len(models) == len(optimizers) == 1 and self._maybe(0.7):
            return [f"_, _, loader = train.prepare(model0, optimizer0, loader{tracked})"]
        given = f"[{', '.join(models)}], [{', '.join(optimizers)}], loader{tracked}"
        return [f"_, _, loader = train.prepare({given})"]

    def _point(self) -> str:
        self._points += 1
        return f"point({self._points - 1})"

    def _batch(self) -> list[str]:
        lines = [self._point()]
        if self._maybe(0.15):
            lines += [f"if place == {self._dice.randrange(NUM_BATCHES)}:", "    continue"]
        if self._maybe(0.25):
            lines += [
                f"if place % 2 == {self._dice.randrange(2)}:",
                "    model0.eval()",
                "    with torch.no_grad():",
                "        model0(inputs).sum()",
                "    model0.train()",
            ]
        num_passes = self._dice.choice((1, 1, 2, 2, 3, 4))
        kept = None
        for number in range(num_passes):
            lines += self._pass(number, kept)
            if kept is None and self._maybe(0.4):
                kept = f"hidden{number}"
        return lines

    def _pass(self, number: int, kept: str | None) -> list[str]:
        """A pass over a chain of models, of which some values may come from an earlier pass."""
        dice = self._dice
        chain = dice.sample(range(self._num_models), dice.randint(1, self._num_models))
        optimizers = sorted({max(0, each - self._shares) for each in chain})
        stepping = [n for n in optimizers if self._maybe(0.75)]
        lines = []
        for each in optimizers if self._maybe(0.85) else ():
            how = "" if self._maybe(0.8) else "set_to_none=False"
            lines.append(f"optimizer{each}.zero_grad({how})")
        source = f"{kept}.detach()" if kept and self._maybe(0.5) else "inputs"
        lines.append(f"hidden{number} = {source}")
        for position, each in enumerate(chain):
            lines.append(f"hidden{number} = model{each}(hidden{number})")
            if position + 1 < len(chain) and self._maybe(0.3):
                lines.append(f"hidden{number} = hidden{number}.detach()")
        sign = dice.choice(("", "-0.1 * ", "0.5 * "))
        loss = f"functional.mse_loss(hidden{number}.sum(1, keepdim=True), targets)"
        lines.append(f"loss{number} = {sign}{loss}")
        lines += [self._point()]
        lines += [f"BACKWARD(loss{number})"]
        lines += [self._point()]
        if stepping and self._maybe(0.3):
            lines.append(
                f"nn.utils.clip_grad_norm_([p for g in optimizer{stepping[0]}.param_groups "
                "for p in g['params']], 0.5)"
            )
        every = 2 if self._maybe(0.2) else 1
        for each in stepping:
            guard = f"if place % {every} == 0: " if every > 1 else ""
            lines.append(f"{guard}optimizer{each}.step()")
            if each in self._scheduled and self._maybe(0.6):
                lines.append(f"{guard}scheduler{each}.step()")
            lines.append(self._point())
        return lines
