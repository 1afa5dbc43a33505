"""A rank of a prepared script dies: no step is lost, and the result is bitwise equal."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dray.train.prepared import exchange as exchange_module
from ray_workers.shared.contracts import LEFT_EXIT_CODE, RankTask
from ray_workers.training.core.faultpoints import FaultPoint, arm
from tests.marks import ONE_SET, SOAK, soak_but
from tests.unit.training.prepared.programs import DEFAULTS, assert_same, final_state, program, run
from tests.unit.training.ranks import checkpoint_refs, frames, replaced, run_ranks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    @functools.cache
    def state(world_size: int, start: str = DEFAULTS["START"]) -> list[Any]:
        return run(tmp_path_factory.mktemp("undisturbed"), world_size, START=start)

    return state


POINTS = {
    "before the first backward pass": {"BEFORE": "lambda step: die({rank}, step == 1)"},
    "before a backward pass": {"BEFORE": "lambda step: die({rank}, step == 7)"},
    "between backward pass and step": {"AFTER_BACKWARD": "lambda step: die({rank}, step == 7)"},
    "after the step": {"AFTER_STEP": "lambda step: die({rank}, step == 7)"},
    "after an epoch": {"AFTER_EPOCH": "lambda epoch: die({rank}, epoch == 1)"},
    "at the end": {"AT_END": "lambda: die({rank}, True)"},
    "when the steps are done": {
        "AT_END": "lambda: die({rank}, True)",
        "START": "lambda: train.progress(total_steps=13)",
    },
    "in an epoch counted by range": {
        "BEFORE": "lambda step: die({rank}, step == 12)",
        "COUNTS": "False",
    },
}


CASES = [
    f"{point}, rank {rank} of {size}" for point in POINTS for rank in (0, 1) for size in (2, 3)
]
SHORT = ("between backward pass and step, rank 0 of 2", "after an epoch, rank 1 of 3")


@pytest.mark.parametrize("case", soak_but(CASES, short=SHORT))
def test_a_rank_is_killed(
    tmp_path: Path,
    undisturbed: Callable[..., list[Any]],
    case: str,
) -> None:
    point, where = case.rsplit(", ", 1)
    rank, world_size = (int(word) for word in where.split() if word.isdigit())
    options = {name: text.format(rank=rank) for name, text in POINTS[point].items()}
    state = run(tmp_path, world_size, **options)
    assert replaced(tmp_path) == [rank]
    assert_same(state, undisturbed(world_size, options.get("START", DEFAULTS["START"])))


@SOAK
def test_a_rank_in_a_fresh_interpreter_is_replaced_as_a_forked_one_is(
    tmp_path: Path, undisturbed: Callable[..., list[Any]]
) -> None:
    document = program(tmp_path, BEFORE="lambda step: die(0, step == 7)")
    document["environment"] = {"env": {"PYTHONHASHSEED": "7"}}
    assert run_ranks(tmp_path, document, world_size=2, recovers=True) == [0, 0]
    assert replaced(tmp_path) == [0]
    assert_same(final_state(tmp_path, 2), undisturbed(2))


def test_a_rank_whose_exchange_the_others_ended_gets_its_result(
    tmp_path: Path, undisturbed: Callable[..., list[Any]]
) -> None:
    """Rank 1 considers step 7 interrupted, although rank 0 has completed it; rank 2 dies in step
    8."""
    state = run(tmp_path, 3, before=miss_the_end, BEFORE="lambda step: die(2, step == 8)")
    assert replaced(tmp_path) == [2]
    assert_same(state, undisturbed(3))


def miss_the_end(task: RankTask) -> None:
    if task.rank != 1 or task.incarnation:
        return

    def break_the_next() -> None:
        exchange = exchange_module.GradientExchange
        run_it = exchange.run

        def fail_after(*args: Any) -> Any:
            exchange.run = run_it  # type: ignore[method-assign]
            run_it(*args)
            raise RuntimeError("Connection closed by peer")

        exchange.run = fail_after  # type: ignore[method-assign]

    arm(FaultPoint.BEFORE_EXCHANGE, break_the_next, at_step=7)


@ONE_SET
@pytest.mark.parametrize("asked_in", ["AFTER_BACKWARD", "AFTER_STEP"])
def test_a_script_that_is_asked_to_leave_loses_no_step(
    tmp_path: Path, undisturbed: Callable[..., list[Any]], asked_in: str
) -> None:
    stops = 'os.environ["DRAY_ATTEMPT"] == "1" and step == 7 and os.kill(os.getpid(), 15)'
    document = program(tmp_path, **{asked_in: f"lambda step: {stops}"})
    assert run_ranks(tmp_path, document, world_size=2) == [LEFT_EXIT_CODE] * 2
    (ref,) = checkpoint_refs(tmp_path)
    assert ref.step == 7
    codes = run_ranks(tmp_path, document, world_size=2, attempt=2, resume_from=[ref])
    assert codes == [0, 0]
    assert_same(final_state(tmp_path, 2), undisturbed(2))
    (receipt,) = frames(tmp_path, attempt=2, kind="resumed")
    assert receipt["step"] == 7
    steps = [frame["step"] for frame in frames(tmp_path, attempt=2, kind="metrics")]
    assert steps == list(range(8, 16))


def test_checkpoints_are_saved_beside_the_training_and_the_last_two_stay(tmp_path: Path) -> None:
    document = program(tmp_path, INIT='{"checkpoint_every_steps": 4}')
    assert run_ranks(tmp_path, document, world_size=2) == [0, 0]
    assert [ref.step for ref in reversed(checkpoint_refs(tmp_path))] == [4, 8, 12]
    dropped = [frame["step"] for frame in frames(tmp_path, kind="checkpoint_dropped")]
    assert dropped == [4]


def test_every_step_is_reported_once_with_its_epoch_and_total(tmp_path: Path) -> None:
    run(tmp_path, 2, AFTER_STEP="lambda step: die(1, step == 7)")
    told = frames(tmp_path, kind="metrics")
    assert [frame["step"] for frame in told] == list(range(1, 16))
    assert [frame["epoch"] for frame in told] == [0] * 5 + [1] * 5 + [2] * 5
    assert {frame["total_steps"] for frame in told} == {15}


@pytest.mark.soak
def test_loader_processes_draw_the_same_numbers(
    tmp_path: Path, undisturbed: Callable[..., list[Any]]
) -> None:
    # The test processes must not have child processes, and other processes would run the script
    # again.
    allowed = "multiprocessing.current_process()._config.update(daemon=False)"
    forks = 'multiprocessing.set_start_method("fork", force=True)'
    state = run(
        tmp_path,
        2,
        multiprocessing='__import__("multiprocessing")',
        WORKERS="1",
        START=f"lambda: ({allowed}, {forks})",
        BEFORE="lambda step: die(1, step == 7)",
    )
    assert_same(state, undisturbed(2))


def test_without_a_batch_to_go_on_from_the_checkpoint_is_left(tmp_path: Path) -> None:
    """A script that leaves its loop early waits at its end, one step after its last batch."""
    breaks = "lambda step: (step == 7 and (die(1, True), sys.exit(0)))"
    document = program(tmp_path, AFTER_STEP=breaks, sys='__import__("sys")')
    assert run_ranks(tmp_path, document, world_size=2, recovers=True) == [1, 1]
    for rank in (0, 1):
        (error,) = frames(tmp_path, rank=rank, kind="error")
        assert error["cause"] == "worker_lost"
        assert "the job resumes from its latest checkpoint" in error["message"]


CLOSURES = """
    import os, torch
    from dray import train
    train.init(seed=1, checkpoint_every_s=None)
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = train.prepare(model, optimizer, loader)
    FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for inputs, targets in loader:
        batch, calls = train.progress().batch, []
        def closure():
            calls.append(1)
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            if FIRST and os.environ["RANK"] == "0" and (batch, len(calls)) == {kill}:
                os.kill(os.getpid(), 9)
            return loss
        optimizer.step(closure)
    torch.save(model.state_dict(), {out!r} + f"/state-{{os.environ['RANK']}}.pt")
"""


def run_closures(home: Path, kill: tuple[int, int]) -> list[Any]:
    home.mkdir()
    path = home / "closures.py"
    path.write_text(textwrap.dedent(CLOSURES).format(kill=kill, out=str(home)))
    document = {"script": {"entrypoint": str(path)}}
    assert run_ranks(home, document, world_size=2, recovers=True) == [0, 0]
    return final_state(home, 2)


@pytest.mark.parametrize("call", [2, pytest.param(1, marks=SOAK), pytest.param(4, marks=SOAK)])
def test_a_rank_is_lost_between_two_calls_of_an_optimizers_closure(
    tmp_path: Path, call: int
) -> None:
    """LBFGS stores the loss of its rank's samples, which differs from rank to rank."""
    found = run_closures(tmp_path / "killed", (5, call))
    assert replaced(tmp_path / "killed") == [0]
    assert_same(found, run_closures(tmp_path / "undisturbed", (0, 0)))


ADDS_UP = """
    import os, torch
    from dray import train
    train.init(seed=1, checkpoint_every_s=None, checkpoint_every_steps=1)
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    model, optimizer, loader = train.prepare(model, optimizer, loader{division})
    for (inputs,) in loader:
        if train.progress().batch == {batch} and {condition}:
            os.kill(os.getpid(), {signal})
        model(inputs).square().mean().backward()  # adds to the gradients of earlier batches
        optimizer.step()
    whole = [getattr(one, "full_tensor", lambda: one)() for one in model.state_dict().values()]
    torch.save(whole, {out!r} + f"/state-{{os.environ['RANK']}}.pt")
"""


FIRST_RANK_0 = 'os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "00"'
IN_ATTEMPT_1 = 'os.environ["DRAY_ATTEMPT"] == "1"'


def adds_up(
    home: Path, batch: int, condition: str = FIRST_RANK_0, signal: int = 9, **changes: Any
) -> dict[str, Any]:
    """Return the document of the program, which sends itself a signal in this batch."""
    home.mkdir(exist_ok=True)
    path = home / "adds_up.py"
    given = {"text": ADDS_UP, "division": "", **changes}
    text = textwrap.dedent(given.pop("text"))
    given |= {"batch": batch, "condition": condition, "signal": signal, "out": str(home)}
    path.write_text(text.format(**given))
    document: dict[str, Any] = {"script": {"entrypoint": str(path)}}
    if given["division"]:
        document |= {"parallel": {"shard": 2}, "resources": {"num_workers": 2}}
    return document


def test_a_rank_is_lost_in_a_batch_that_adds_to_earlier_gradients(tmp_path: Path) -> None:
    """They are kept before the script is known to use them, which it does in batch 1."""
    states = {}
    for batch in (1, 4, -1):
        home = tmp_path / str(batch)
        assert run_ranks(home, adds_up(home, batch), world_size=2, recovers=True) == [0, 0]
        states[batch] = final_state(home, 2)
    assert_same(states[1], states[-1])
    assert_same(states[4], states[-1])


STEPS_WITH_ZEROS = ADDS_UP.replace("SGD(model.parameters(), lr=0.1)", "Adam(model.parameters())")
STEPS_WITH_ZEROS = STEPS_WITH_ZEROS.replace(
    "        model(inputs)",
    "        optimizer.zero_grad(set_to_none=False)\n"
    "        optimizer.step()\n"
    "        model(inputs)",
)


def test_a_new_process_has_zeros_where_the_other_ranks_have_zeros(tmp_path: Path) -> None:
    """Adam's momentum changes the weights if a gradient is zeros, but not if there is none."""
    states = []
    for batch in (-1, 4):
        home = tmp_path / str(batch)
        document = adds_up(home, batch, text=STEPS_WITH_ZEROS)
        assert run_ranks(home, document, world_size=2, recovers=True) == [0, 0]
        assert replaced(home) == ([0] if batch >= 0 else [])
        states.append(final_state(home, 2))
    assert_same(*states)


@pytest.mark.parametrize(
    ("world_size", "division"), [(1, ""), (2, ""), (2, ", shard=2, blocks='[01]'")]
)
def test_a_checkpoint_has_the_gradients_that_the_next_batch_adds_to(
    tmp_path: Path, world_size: int, division: str
) -> None:
    """Also if dray exchanges no gradients: those of a single rank, or of a divided model."""
    states = []
    for batch in (-1, 0, 2):
        home = tmp_path / str(batch)
        document = adds_up(home, batch, IN_ATTEMPT_1, signal=15, division=division)
        codes = run_ranks(home, document, world_size=world_size)
        if batch >= 0:
            assert codes == [LEFT_EXIT_CODE] * world_size
            refs = checkpoint_refs(home)[:1]
            codes = run_ranks(home, document, world_size=world_size, attempt=2, resume_from=refs)
            (receipt,) = frames(home, attempt=2, kind="resumed")
            assert receipt["step"] == batch + 1
        assert codes == [0] * world_size
        states.append(final_state(home, world_size))
    assert_same(states[1], states[0])
    assert_same(states[2], states[0])


IN_TWO_CALLS = (
    ADDS_UP.replace(
        "    model, optimizer, loader = train.prepare(model, optimizer, loader{division})",
        """    head = torch.nn.Linear(2, 2)
    second = torch.optim.Adam(head.parameters(), lr=0.1)
    model, optimizer, loader = train.prepare(model, optimizer, loader{division})
    head, second, _ = train.prepare(head, second)""",
    )
    .replace("model(inputs).square()", "head(model(inputs)).square()")
    .replace("        optimizer.step()", "        optimizer.step()\n        second.step()")
)


def test_models_of_several_calls_resume_on_all_ranks(tmp_path: Path) -> None:
    states = []
    for batch in (-1, 2):
        home = tmp_path / str(batch)
        document = adds_up(home, batch, IN_ATTEMPT_1, signal=15, text=IN_TWO_CALLS)
        codes = run_ranks(home, document, world_size=2)
        if batch >= 0:
            assert codes == [LEFT_EXIT_CODE] * 2
            refs = checkpoint_refs(home)[:1]
            codes = run_ranks(home, document, world_size=2, attempt=2, resume_from=refs)
        assert codes == [0, 0]
        states.append(final_state(home, 2))
    assert_same(*states)


ADDS_A_PARAMETER = ADDS_UP.replace(
    "    for (inputs,)",
    "    model.register_parameter('late', torch.nn.Parameter(torch.ones(1)))\n    for (inputs,)",
)


def test_a_parameter_that_is_added_to_a_prepared_model_is_refused(tmp_path: Path) -> None:
    document = adds_up(tmp_path, -1, text=ADDS_A_PARAMETER)
    assert run_ranks(tmp_path, document, world_size=2) == [1, 1]
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == "cannot_run"
    assert "parameters that were created after prepare(): late. " in error["message"]


ADDS_LATER = ADDS_UP.replace(
    "        model(inputs)",
    "        train.progress().batch < 3 and optimizer.zero_grad()\n        model(inputs)",
).replace("every_steps=1", "every_steps=3")


def test_a_checkpoint_is_replaced_if_the_next_batch_adds_to_gradients_that_it_lacks(
    tmp_path: Path,
) -> None:
    """In batch 3, the script adds to earlier gradients for the first time, although it has replaced
    gradients before."""
    document = adds_up(tmp_path, -1, text=ADDS_LATER)
    assert run_ranks(tmp_path, document, world_size=2) == [0, 0]
    undisturbed = final_state(tmp_path, 2)
    assert [found["step"] for found in frames(tmp_path, kind="checkpoint")] == [3, 4]
    newest = checkpoint_refs(tmp_path)[:1]
    codes = run_ranks(tmp_path, document, world_size=2, attempt=2, resume_from=newest)
    assert codes == [0, 0]
    (receipt,) = frames(tmp_path, attempt=2, kind="resumed")
    assert receipt["step"] == 4
    assert_same(final_state(tmp_path, 2), undisturbed)


STEPS_WITH_OLD = """
    import os, torch
    from dray import train
    train.init(seed=1)
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    models, optimizers, loader = train.prepare(models, optimizers, loader)
    for (inputs,) in loader:
        if train.progress().batch == 2 and {first_rank_0}:
            os.kill(os.getpid(), 9)
        for number, (model, optimizer) in enumerate(zip(models, optimizers)):
            if number and train.progress().batch == 2:
                optimizer.step()  # with the gradients of batch 1
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
"""


def test_gradients_that_a_new_process_lacks_end_the_attempt_with_their_reason(
    tmp_path: Path,
) -> None:
    """The other rank uses them after it has handed over the state without them."""
    path = tmp_path / "steps.py"
    path.write_text(textwrap.dedent(STEPS_WITH_OLD).format(first_rank_0=FIRST_RANK_0))
    document = {"script": {"entrypoint": str(path)}}
    assert run_ranks(tmp_path, document, world_size=2, recovers=True, ends_with_error=True)[1]
    errors = [error for rank in (0, 1) for error in frames(tmp_path, rank=rank, kind="error")]
    assert errors
    assert {error["type"] for error in errors} == {"BatchLostError"}
