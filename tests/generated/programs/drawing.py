"""Generates random training scripts, in the way that people write them.

Each decision has its own dice, so that one feature can be left out while the others remain.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.generated.programs.batch import Trained, batch
from tests.generated.programs.dice import Dice
from tests.generated.programs.script import DrawnProgram

EPOCHS = 2
EPOCH_BATCHES = 3
NUM_BATCHES = EPOCHS * EPOCH_BATCHES
OWN_CHECKPOINTS = 3
"""Seeds that end with this number save the script's own checkpoint at the end of each epoch."""

_KINDS = (
    "SGD({p}, lr=0.05, momentum=0.9)",
    "SGD({p}, lr=0.05)",
    "AdamW({p}, lr=0.01, eps=1e-4)",
    "RMSprop({p}, lr=0.01, eps=1e-4)",
    "Adagrad({p}, lr=0.02, eps=1e-4)",
    "SGD([{{'params': {p}, 'lr': 0.03}}], lr=0.05, momentum=0.5, nesterov=True)",
)
_SCHEDULERS = (
    "StepLR({o}, 2, 0.7)",
    "CosineAnnealingLR({o}, 4)",
    "LambdaLR({o}, lambda n: 1 / (1 + n))",
)


def draw(seed: int, without: frozenset[str] = frozenset()) -> DrawnProgram:
    """Return the program of this seed, without these features."""
    return _Drawing(seed, without).program()


class _Drawing:
    def __init__(self, seed: int, without: frozenset[str]) -> None:
        self._seed = seed
        self._dice = dice = Dice(seed, without)
        self._trained = Trained(
            num_models=dice.pick("models", (2, 2, 3)) if dice.has("several_models", 0.6) else 1,
            is_shared=False,
            num_passes=dice.pick("passes", (2, 2, 3, 4)) if dice.has("several_passes", 0.55) else 1,
        )
        if self._trained.num_models > 1:
            self._trained.is_shared = dice.has("shared_optimizer", 0.2)
        self._tracked: list[str] = []
        self._nets = [f"net{n}" for n in range(self._trained.num_models)]
        self._optimizers = [f"optimizer{n}" for n in self._trained.optimizers]

    def program(self) -> DrawnProgram:
        loader, samples = self._loader()
        lines = [*self._models(), *self._make_optimizers(), *self._own_state()]
        lines += [*self._own_checkpoint(), *self._preparing(), *_EVALUATION]
        lines += [*self._loop(), *self._saving(), *self._leaving()]
        body = "\n".join(lines) + "\n"
        dice = self._dice
        return DrawnProgram(
            self._seed, body, frozenset(dice.features), dice.num_points, samples, loader
        )

    def _loader(self) -> tuple[str, int]:
        has = self._dice.has
        batch, samples = (7, 20) if has("uneven", 0.4) else (6, 18)
        options = f"batch_size={batch}"
        if has("shuffle", 0.08):
            options += ", shuffle=True"
        elif has("own_sampler", 0.2):
            options += ", sampler=OwnOrder()"
        elif has("batch_sampler", 0.1):
            options = "batch_sampler=torch.utils.data.BatchSampler("
            options += f"OwnOrder(), {batch}, drop_last=False)"
        if has("loader_workers", 0.05):
            options += ", num_workers=1, multiprocessing_context='fork'"
        return options, samples

    def _models(self) -> list[str]:
        lines = ["thawed = []"]
        for number, net in enumerate(self._nets):
            lines += self._model(number, net)
        if len(self._nets) > 1 and self._dice.has("tied_models", 0.1):
            lines.append("net1[0].weight = net0[0].weight")
        return lines

    def _model(self, number: int, net: str) -> list[str]:
        def has(feature: str, share: float) -> bool:
            return self._dice.has(feature, share, number)

        layers = ["nn.Linear(4, 5)"]
        layers += ["nn.BatchNorm1d(5)"] * has("batchnorm", 0.25)
        layers += ["nn.Tanh()"]
        layers += ["nn.Dropout(0.3)"] * has("dropout", 0.08)
        layers += ["nn.LayerNorm(5)"] * has("layernorm", 0.15)
        layers += ["nn.Linear(5, 4)"]
        layers += ["Block()"] * has("block", 0.15)
        lines = [f"{net} = nn.Sequential({', '.join(layers)})"]
        if has("tied_layers", 0.12):
            lines += [f"tied = nn.Linear(4, 5); tied.weight = {net}[0].weight"]
            lines += [f"{net}.extend([tied, nn.Linear(5, 4)])"]
        if has("unused", 0.15):
            lines.append(f"{net}.register_parameter('unused', nn.Parameter(torch.zeros(2)))")
        if has("frozen", 0.12):
            lines.append(f"{net}[0].bias.requires_grad_(False)")
        if has("thawed", 0.12):
            lines += [f"{net}[0].weight.requires_grad_(False)", f"thawed.append({net}[0].weight)"]
        if has("gradient_hook", 0.12):
            lines.append(f"{net}[2].register_full_backward_hook(lambda *_: None)")
            lines.append(f"{net}[-1].register_parameter('gain', nn.Parameter(torch.ones(4)))")
            lines.append(f"{net}[-1].gain.register_hook(lambda grad: 0.5 * grad)")
            lines.append(f"{net}[-1].register_forward_hook(lambda m, i, out: out * m.gain)")
        return lines

    def _make_optimizers(self) -> list[str]:
        lines = [f"{net}.to(DEVICE)" for net in self._nets]
        for number, optimizer in enumerate(self._optimizers):
            nets = [n for n in range(len(self._nets)) if self._trained.optimizer_of(n) == number]
            listed = " + ".join(f"list(net{n}.parameters())" for n in nets)
            listed = listed if len(nets) == 1 else f"list(dict.fromkeys({listed}))"
            if number == 0 and len(nets) == 1 and self._may_add_group():
                listed = f"list({self._nets[nets[0]]}[1:].parameters())"
            kind = self._dice.pick("kind", _KINDS, number).format(p=listed)
            lines.append(f"{optimizer} = torch.optim.{kind}")
            is_added_to = number == 0 and "group_added" in self._dice.features
            if not is_added_to and self._dice.has("scheduler", 0.3, number):
                kind = self._dice.pick("scheduler", _SCHEDULERS, number).format(o=optimizer)
                lines.append(f"scheduler{number} = torch.optim.lr_scheduler.{kind}")
                self._trained.scheduled.add(number)
                self._tracked.append(f"scheduler{number}")
        return lines

    def _may_add_group(self) -> bool:
        """Whether the first optimizer gets the first layer in the second epoch."""
        tied = {"tied_layers", "tied_models"} & self._dice.features
        return not tied and self._dice.has("group_added", 0.07)

    def _own_state(self) -> list[str]:
        has = self._dice.has
        has("unseeded", 0.06)
        lines = ["own, best = {'batches': 0}, {'loss': None}"]
        if has("forked", 0.08):
            code = self._dice.pick("exit", (0, 7))
            lines += [f"assert exit_code_of_child({code}) == {code}"]
        if has("ema", 0.2):
            lines += ["ema = copy.deepcopy(net0).requires_grad_(False)"]
            self._tracked.append("ema")
        if has("counter", 0.2):
            lines += ["kept = Kept(batches=0)"]
            self._tracked.append("kept")
        if self._trained.is_simple and has("scaler", 0.2):
            lines += ["scaler = torch.amp.GradScaler('cpu', init_scale=8.0, growth_interval=2)"]
            self._tracked.append("scaler")
        return lines

    def _own_checkpoint(self) -> list[str]:
        is_rare = self._seed % 10 == OWN_CHECKPOINTS
        if not self._dice.has("own_checkpoint", 1.0 if is_rare else 0.15):
            return []
        self._dice.has("clean_epochs", 1.0 if is_rare else 0.3)
        resumes = self._dice.has("own_resume", 0.5)
        return [
            "first_epoch = 0",
            "if os.path.exists(f'{OUT}/own.pt'):",
            "    saved_epoch, *states = torch.load(f'{OUT}/own.pt')",
            f"    first_epoch = {'saved_epoch' if resumes else 'resumed(saved_epoch)'}",
            f"    for one, state in zip([{self._everything()}], states):",
            "        one.load_state_dict(state)",
        ]

    def _everything(self) -> str:
        return ", ".join([*self._nets, *self._optimizers, *self._tracked])

    def _preparing(self) -> list[str]:
        has = self._dice.has
        tracked = "".join(f", {name}={name}" for name in self._tracked)
        if has("buffers_apart", 0.1):
            tracked = ", broadcast_buffers=False" + tracked
        are_pairs = len(self._nets) == len(self._optimizers)
        if are_pairs and (len(self._nets) == 1 or has("prepared_apart", 0.3)):
            others = [
                f"model{n}, _, _ = train.prepare(net{n}, optimizer{n})"
                for n in range(1, len(self._nets))
            ]
            return [
                f"model0, _, loader = train.prepare(net0, optimizer0, loader{tracked})",
                *others,
            ]
        models = ", ".join(f"model{n}" for n in range(len(self._nets)))
        given = f"[{', '.join(self._nets)}], [{', '.join(self._optimizers)}], loader{tracked}"
        return [f"[{models}], _, loader = train.prepare({given})"]

    def _saving(self) -> list[str]:
        state = ", ".join(f"{one}.state_dict()" for one in self._everything().split(", "))
        return [f"torch.save(on_cpu([{state}]), f'{{OUT}}/state-{{RANK}}.pt')"]

    def _leaving(self) -> list[str]:
        ways = ("sys.exit()", "sys.exit(0)", "raise SystemExit", "sys.exit(False)")
        return [self._dice.pick("leaves", ways)] if self._dice.has("leaves", 0.1) else []

    # The loop.

    def _loop(self) -> list[str]:
        form = self._dice.pick("form", ("flat", "function", "class", "generator", "while"))
        form = "flat" if not self._dice.has("formed", 0.7) else form
        has_own = "own_checkpoint" in self._dice.features
        first = "first_epoch" if has_own else "0"
        epochs = f"range({first}, 2)"
        if self._dice.has("counted_epochs", 0.3) and "own_resume" not in self._dice.features:
            epochs = "train.epochs(2)"
        begins, ends = self._epoch_begins(), self._epoch_ends()
        if form == "function":
            leave = {"continue": "return", "break": "return"}
            lines = ["def train_batch(epoch, inputs, targets):"]
            lines += _indented(batch(self._dice, self._trained, leave))
            lines += ["def train_epoch(epoch):", *_indented(begins), *self._over_loader()]
            lines += ["        train_batch(epoch, inputs, targets)", *_indented(ends)]
            return [*lines, f"for epoch in {epochs}:", "    train_epoch(epoch)"]
        body = batch(self._dice, self._trained, {"continue": "continue", "break": "break"})
        if form == "generator":
            lines = ["def batches():", f"    for epoch in {epochs}:", *_indented(begins, 2)]
            lines += _indented([*self._over_loader(), "        yield epoch, inputs, targets"])
            lines += _indented(ends, 2)
            return [*lines, "for epoch, inputs, targets in batches():", *_indented(body)]
        if form == "class":
            lines = ["class Trainer:", "    def fit(self):", f"        for epoch in {epochs}:"]
            lines += [*_indented(begins, 3), *_indented(self._over_loader(), 2)]
            return [*lines, *_indented(body, 4), *_indented(ends, 3), "Trainer().fit()"]
        if form == "while":
            lines = [
                f"epoch = {first}",
                "while epoch < 2:",
                *_indented(begins),
                "    batches = iter(loader)",
            ]
            lines += [
                "    while True:",
                "        try:",
                "            inputs, targets = next(batches)",
            ]
            lines += ["        except StopIteration:", "            break", *_indented(body, 2)]
            return [*lines, *_indented(ends), "    epoch += 1"]
        lines = [f"for epoch in {epochs}:", *_indented(begins), *self._over_loader()]
        return [*lines, *_indented(body, 2), *_indented(ends)]

    def _over_loader(self) -> list[str]:
        over = self._dice.pick("over", ("plain", "plain", "enumerate", "zip"))
        if over == "enumerate":
            return ["    for number, (inputs, targets) in enumerate(loader):"]
        if over == "zip":
            return ["    for (inputs, targets), name in zip(loader, itertools.cycle('ab')):"]
        return ["    for inputs, targets in loader:"]

    def _epoch_begins(self) -> list[str]:
        lines = []
        if "group_added" in self._dice.features:
            lines += ["if epoch == 1:"]
            lines += ["    optimizer0.add_param_group({'params': net0[0].parameters()})"]
        if self._dice.has("parameter_added", 0.03):
            lines += ["if epoch == 1:"]
            lines += ["    extra = nn.Parameter(torch.zeros(4))"]
            lines += ["    optimizer0.add_param_group({'params': [extra], 'lr': 0.02})"]
            lines += ["    net0[-1].register_parameter('extra', extra)"]
            lines += ["    net0.register_forward_hook(lambda m, i, out: out + m[-1].extra)"]
        if "block" not in self._dice.features and self._dice.has("layer_replaced", 0.03):
            lines += ["if epoch == 1:", "    net0[-1] = nn.Linear(*net0[-1].weight.T.shape)"]
            lines += ["    optimizer0.add_param_group({'params': net0[-1].parameters()})"]
        return lines

    def _epoch_ends(self) -> list[str]:
        lines = [self._dice.point()]
        for number in sorted(self._trained.scheduled):
            if self._dice.has("scheduled_epochs", 0.4, number):
                lines += [f"scheduler{number}.step()"]
        if self._dice.has("evaluation", 0.3):
            lines += ["if train.progress().step:", "    train.report({'val/loss': evaluate()})"]
        if "own_checkpoint" in self._dice.features:
            state = ", ".join(f"{one}.state_dict()" for one in self._everything().split(", "))
            if "clean_epochs" in self._dice.features:
                lines += [f"for one in [{', '.join(self._optimizers)}]:", "    one.zero_grad()"]
            lines += ["if RANK == 0:"]
            lines += [f"    torch.save([epoch + 1, {state}], f'{{OUT}}/new.pt')"]
            lines += ["    os.replace(f'{OUT}/new.pt', f'{OUT}/own.pt')"]
        return [*lines, self._dice.point()]


_EVALUATION = (
    "def evaluate():",
    "    inputs, targets = x.to(DEVICE), y.to(DEVICE)",
    "    net0.eval()",
    "    with torch.no_grad():",
    "        found = functional.mse_loss(net0(inputs).sum(1, keepdim=True), targets).item()",
    "    net0.train()",
    "    return found",
)


def _indented(lines: Iterable[str], depth: int = 1) -> list[str]:
    return ["    " * depth + line for line in lines]
