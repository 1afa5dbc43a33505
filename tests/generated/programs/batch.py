"""Generates the lines of a batch: passes, exchanges and steps in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.generated.programs.dice import Dice


@dataclass
class Trained:
    """The models and optimizers that a program trains."""

    num_models: int
    is_shared: bool
    """Whether the first optimizer has the parameters of the first two models."""
    num_passes: int
    scheduled: set[int] = field(default_factory=set)
    """Optimizers with a scheduler."""

    @property
    def optimizers(self) -> list[int]:
        return list(range(self.num_models - self.is_shared))

    @property
    def is_simple(self) -> bool:
        """Whether each batch has one pass over one model, and one step."""
        return self.num_models == self.num_passes == 1

    def optimizer_of(self, model: int) -> int:
        return max(0, model - self.is_shared)


def batch(dice: Dice, trained: Trained, leave: dict[str, str]) -> list[str]:
    """leave: the statements that end a batch and an epoch early."""
    lines = _bookkeeping(dice)
    lines += [dice.point()]
    for how, share in (("continue", 0.12), ("break", 0.08)):
        if dice.has(how, share):
            place = dice.pick(how, range(6))
            lines += [f"if at['place'] == {place}:", f"    {leave[how]}"]
    if dice.has("evaluation_within", 0.15):
        lines += [f"if at['place'] % 2 == {dice.pick('evaluated', (0, 1))}:"]
        lines += ["    train.report({'val/loss': evaluate()})"]
    if "thawed" in dice.features:
        lines += ["for parameter in thawed:"]
        lines += ["    parameter.requires_grad_(progress.epoch > 0)"]
    kept = None
    for number in range(trained.num_passes):
        lines += _pass(dice, trained, number, kept, leave["continue"])
        if kept is None and dice.has("reused", 0.4, number):
            kept = f"hidden{number}"
    if dice.has("ema", 0.2):
        lines += ["with torch.no_grad():"]
        lines += ["    for mean, new in zip(ema.parameters(), net0.parameters()):"]
        lines += ["        mean.lerp_(new, 0.1)"]
    if dice.has("own_best", 0.2):
        lines += ["if best['loss'] is None or loss0.item() < best['loss']:"]
        lines += ["    best['loss'] = loss0.item()"]
    return lines


def _bookkeeping(dice: Dice) -> list[str]:
    lines = ["inputs, targets = inputs.to(DEVICE), targets.to(DEVICE)"]
    lines += ["progress = train.progress()"]
    lines += ["at['place'] = progress.epoch * 3 + progress.batch"]
    if dice.has("counter", 0.2):
        lines += ["kept.values['batches'] += 1"]
    if dice.has("untracked", 0.08):
        lines += ["own['batches'] += 1"]
    return lines


def _pass(dice: Dice, trained: Trained, number: int, kept: str | None, leave: str) -> list[str]:
    """Write a pass over a chain of models, in which some values can come from an earlier pass."""
    chain = dice.some("chain", range(trained.num_models), number)
    optimizers = sorted({trained.optimizer_of(each) for each in chain})
    adds_up = trained.is_simple and dice.has("no_sync", 0.25)
    zeroing = []
    for each in optimizers if dice.has("zeroes", 0.85, number) else ():
        how = "set_to_none=False" if dice.has("zeroed_in_place", 0.2, f"{number} {each}") else ""
        zeroing.append(f"optimizer{each}.zero_grad({how})")
    lines = [*([] if adds_up else zeroing), *_loss(dice, chain, number, kept), dice.point()]
    if adds_up:
        lines += _adding_up(dice, f"loss{number}", leave)
    lines += [*_backward(dice, f"loss{number}", number), dice.point()]
    lines += _steps(dice, trained, number, optimizers)
    return lines + (zeroing if adds_up else [])


def _loss(dice: Dice, chain: list[int], number: int, kept: str | None) -> list[str]:
    hidden = f"hidden{number}"
    source = "inputs"
    if kept and dice.has("detached_source", 0.5, number):
        source = f"{kept}.detach()"
    if dice.has("noise", 0.06, number):
        source = "torch.randn(len(inputs), 4)"
    lines = [f"{hidden} = {source}"]
    for position, each in enumerate(chain):
        lines.append(f"{hidden} = model{each}({hidden})")
        if position + 1 < len(chain) and dice.has("detach", 0.3, f"{number} {position}"):
            lines.append(f"{hidden} = {hidden}.detach()")
    sign = dice.pick("sign", ("", "-0.1 * ", "0.5 * "), number)
    kind = dice.pick("loss", ("mse_loss", "smooth_l1_loss", "mse_loss"), number)
    loss = f"functional.{kind}({hidden}.sum(1, keepdim=True), targets)"
    lines.append(f"loss{number} = {sign}{loss}")
    if "counter" in dice.features and dice.has("counted_loss", 0.5, number):
        lines.append(f"loss{number} = loss{number} / kept.values['batches']")
    if dice.has("bf16", 0.06):
        inner = [f"    {line}" for line in lines]
        lines = ["with torch.autocast('cpu', dtype=torch.bfloat16):", *inner]
    return lines


def _adding_up(dice: Dice, loss: str, leave: str) -> list[str]:
    """Write batches whose gradients are accumulated, and exchanged with those of the next batch."""
    if "uneven" in dice.features:
        dice.features.add("uneven_accumulation")
    return [
        "if at['place'] % 3 == 0:",
        "    with train.no_sync():",
        f"        BACKWARD({_scaled(dice, loss)})",
        f"    {dice.point()}",
        f"    {leave}",
    ]


def _scaled(dice: Dice, loss: str) -> str:
    return f"scaler.scale({loss})" if "scaler" in dice.features else loss


def _backward(dice: Dice, loss: str, number: int) -> list[str]:
    if "scaler" not in dice.features and dice.has("split_loss", 0.1, number):
        return [f"BACKWARD(0.5 * {loss}, retain_graph=True)", f"BACKWARD({loss})"]
    return [f"BACKWARD({_scaled(dice, loss)})"]


def _steps(dice: Dice, trained: Trained, number: int, optimizers: list[int]) -> list[str]:
    stepping = [
        n for n in optimizers if trained.is_simple or dice.has("steps", 0.75, f"{number} {n}")
    ]
    if number == 0:
        stepping = stepping or optimizers[:1]
    lines = []
    for each in stepping[:1] if "scaler" in dice.features else ():
        lines.append(f"scaler.unscale_(optimizer{each})")
    if stepping:
        own = f"[p for g in optimizer{stepping[0]}.param_groups for p in g['params']]"
        if dice.has("clip_norm", 0.25, number):
            lines.append(f"nn.utils.clip_grad_norm_({own}, 0.5)")
        elif dice.has("clip_value", 0.12, number):
            lines.append(f"nn.utils.clip_grad_value_({own}, 0.05)")
    guard = ""
    if dice.has("accumulates", 0.2, number):
        guard = "if at['place'] % 2 == 0: "
    elif "counter" in dice.features and dice.has("counted_steps", 0.5, number):
        guard = "if kept.values['batches'] % 2 == 0: "
    elif "untracked" in dice.features and dice.has("counts_itself", 0.5, number):
        guard = "if own['batches'] % 2 == 0: "
    for each in stepping:
        step = f"optimizer{each}.step()"
        if "scaler" in dice.features:
            step, guard = f"scaler.step(optimizer{each}); scaler.update()", ""
        lines.append(f"{guard}{step}")
        if each in trained.scheduled and dice.has("scheduled_steps", 0.6, f"{number} {each}"):
            lines.append(f"{guard}scheduler{each}.step()")
        lines.append(dice.point())
    return lines
