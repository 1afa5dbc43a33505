"""A rank, forked or in a new interpreter, has the packages, variables, and secrets of its job.

The canary is the value of a secret, which must not occur in any file that leaves the rank.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dray.train.spool import segments
from ray_workers.node.environments.build import Build
from ray_workers.shared.contracts import STORAGE_EXIT_CODE, RankTask
from ray_workers.shared.folders import environment_overlay as overlay
from ray_workers.shared.node_needs import EnvironmentPolicy
from ray_workers.shared.paths import NODE_TMPDIR
from ray_workers.training.process import rank_main
from tests.marks import ONE_SET, SOAK
from tests.unit.training.ranks import make_task
from tests.wheels import from_wheels, make_wheel, served

CANARY = "canary-5f1d"
_context = multiprocessing.get_context("forkserver")


def _rank(text: str, temporary: str, output: str) -> None:
    os.environ[NODE_TMPDIR] = temporary
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    code = rank_main.main(RankTask.from_json(text))
    os._exit(code)


class Node:
    """A folder for all files, with a program that is run by a rank."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.output = folder / "output"
        self.policy = replace(EnvironmentPolicy.open(), secrets_dir=str(folder / "secrets"))
        (folder / "secrets").mkdir()
        (folder / "secrets" / "TOKEN").write_text(f"{CANARY}\n")
        (folder / "secrets" / "TOKEN").chmod(0o600)
        (folder / "tmp").mkdir()
        monkeypatch.setenv(NODE_TMPDIR, str(folder / "tmp"))

    def build(self, environment: dict[str, Any]) -> None:
        asked = {name: environment.get(name) for name in ("requirements", "index", "setup")}
        asked["python_packages"] = []
        key = overlay.key_of(asked, keeps_all=False)
        Build(
            *(overlay.environments_dir(), key, asked, self.policy, lambda: True), keeps_all=False
        ).run()

    def run(
        self, environment: dict[str, Any], program: str, *, world_size: int = 1, **more: Any
    ) -> int | None:
        path = self.folder / "train.py"
        path.write_text(program)
        spec = {"script": {"entrypoint": str(path)}, "environment": environment, **more}
        task = make_task(self.folder, spec, world_size=world_size)
        task = replace(task, environment_policy=self.policy)
        arguments = (task.to_json(), str(self.folder / "tmp"), str(self.output))
        process = _context.Process(target=_rank, args=arguments)
        process.start()
        process.join(60)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"the rank did not end: {self.output.read_text()}")
        return process.exitcode

    def spooled(self) -> str:
        """Return everything that the rank reported."""
        spools = self.folder / "attempt-1" / "spool"
        keys = sorted(path.name for path in spools.iterdir())
        return "".join(path.read_text() for key in keys for _, path in segments(spools / key))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


@pytest.fixture
def wheels(node: Node) -> Iterator[str]:
    (node.folder / "w").mkdir()
    with served(node.folder / "w") as url:
        yield url


def test_a_forked_rank_has_packages_variables_and_secrets_and_so_have_its_children(
    node: Node, wheels: str
) -> None:
    make_wheel(node.folder / "w", "hello_pkg", "3.1")
    environment = {
        **from_wheels(wheels, "hello-pkg"),
        "env": {"MY_FLAG": "on", "OMP_NUM_THREADS": "2"},
        "secrets": ["TOKEN"],
    }
    node.build(environment)
    code = node.run(
        environment,
        "import os, subprocess, sys, torch\n"
        "import hello_pkg, dray, ray_workers\n"
        "from importlib.metadata import version\n"
        "here = os.environ\n"
        "print(hello_pkg.VERSION, version('hello-pkg'), here['MY_FLAG'], len(here['TOKEN']))\n"
        "print(torch.get_num_threads(), 'canary' in open('/proc/self/environ').read())\n"
        "subprocess.run([sys.executable, '-c', 'import hello_pkg; print(hello_pkg.VERSION)'])\n",
    )
    output = node.output.read_text()
    assert code == 0, output
    assert output.splitlines() == [f"3.1 3.1 on {len(CANARY)}", "2 False", "3.1"]


@SOAK
def test_a_package_that_is_preloaded_gives_the_rank_a_fresh_interpreter(
    node: Node, wheels: str
) -> None:
    make_wheel(node.folder / "w", "numpy", "0.0.1")
    environment = {
        **from_wheels(wheels, "numpy==0.0.1"),
        "env": {"MY_FLAG": "on", "PYTHONHASHSEED": "7"},
        "secrets": ["TOKEN"],
    }
    node.build(environment)
    code = node.run(
        environment,
        "import os, sys\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "import numpy\n"
        "from dray import train\n"
        "train.report(3, {'x': 1.0})\n"
        "here = os.environ\n"
        "print(numpy.VERSION, here['RANK'], here['MY_FLAG'], here['TOKEN'] != '', here['TMPDIR'])\n"
        "print(sorted(loaded & {'torch', 'pydantic', 'ray', 'numpy'}), sys.argv, __name__)\n"
        "print(TOKEN_IN := 'canary' in open('/proc/self/environ').read(), hash('a') % 1000)\n",
    )
    output = node.output.read_text()
    assert code == 0, output
    first, second, third = output.splitlines()
    assert first.startswith("0.0.1 0 on True ")
    assert second == f"[] [{str(node.folder / 'train.py')!r}] __main__"
    assert third.startswith("False ")
    assert '"step":3' in node.spooled().replace(" ", "")


@ONE_SET
@pytest.mark.parametrize("replaces", [False, True], ids=["forked", "fresh"])
def test_no_value_of_a_secret_is_in_the_error_that_a_rank_reports(
    node: Node, wheels: str, *, replaces: bool
) -> None:
    name = "numpy" if replaces else "hello_pkg"
    make_wheel(node.folder / "w", name, "0.0.1")
    environment = {**from_wheels(wheels, f"{name}==0.0.1"), "secrets": ["TOKEN"]}
    node.build(environment)
    code = node.run(
        environment, "import os\nraise ValueError('no access with ' + os.environ['TOKEN'])\n"
    )
    assert code == 1
    told = node.spooled()
    assert "no access with ***" in told
    assert CANARY not in told


@pytest.mark.parametrize(("fresh", "before"), [(False, 780), (True, 1980)], ids=str)
def test_a_reason_is_cut_after_its_secrets_are_masked(
    node: Node, before: int, *, fresh: bool
) -> None:
    environment = {"env": {"PYTHONHASHSEED": "7"} if fresh else {}, "secrets": ["TOKEN"]}
    text = f"raise ValueError('x' * {before} + os.environ['TOKEN'])"
    assert node.run(environment, f"import os\n{text}\n") == 1
    told = node.spooled()
    assert "x" * 700 in told
    assert CANARY[:5] not in told


def test_an_exit_code_and_a_missing_module_are_told_by_a_fresh_interpreter(node: Node) -> None:
    environment = {"env": {"PYTHONHASHSEED": "7"}}
    assert node.run(environment, "import sys; sys.exit(5)\n") == 5
    assert "exited with code 5" in node.spooled()


EITHER = pytest.mark.parametrize(
    "variables", [{}, {"PYTHONHASHSEED": "7"}], ids=["forked", "fresh"]
)


@EITHER
def test_the_error_that_record_wrote_is_the_reason_of_an_exit(
    node: Node, variables: dict[str, str]
) -> None:
    code = node.run(
        {"env": variables},
        "import json, os, sys\n"
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        "    json.dump({'message': {'message': 'ValueError: no such shard'}}, file)\n"
        "sys.exit(3)\n",
    )
    assert code == 3
    assert "ValueError: no such shard (then SystemExit" in node.spooled()


@EITHER
def test_an_exit_after_the_loss_of_a_peer_is_a_secondary_failure(
    node: Node, variables: dict[str, str]
) -> None:
    code = node.run(
        {"env": variables},
        "import sys\n"
        "try:\n"
        "    raise RuntimeError('Connection closed by peer')\n"
        "except RuntimeError:\n"
        "    sys.exit(1)\n",
    )
    assert code == 1
    assert '"cause":"worker_lost"' in node.spooled()


@SOAK
@EITHER
def test_mpi4py_is_refused_and_groups_are_held(node: Node, variables: dict[str, str]) -> None:
    code = node.run(
        {"env": variables},
        "import torch.distributed as dist\n"
        "from ray_workers.training.elastic.kept_groups import kept\n"
        "assert dist.distributed_c10d.new_group is dist.new_group\n"
        "assert dist.init_process_group.__module__ == dist.distributed_c10d.__name__\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "assert kept == [dist.group.WORLD], kept\n"
        "import mpi4py\n",
        world_size=2,
    )
    assert code == 1
    assert "mpi4py is not supported" in node.spooled(), node.output.read_text()


@EITHER
@pytest.mark.parametrize("closes", ["sys.stdout.close()", "sys.stdout = None"])
def test_a_script_that_closes_its_output_ends_well(
    node: Node, variables: dict[str, str], closes: str
) -> None:
    program = f"import sys\nprint('last words', flush=True)\n{closes}\n"
    assert node.run({"env": variables}, program) == 0, node.output.read_text()
    assert node.output.read_text() == "last words\n"


@EITHER
def test_an_error_is_told_though_the_script_has_closed_its_streams(
    node: Node, variables: dict[str, str]
) -> None:
    program = "import sys\nsys.stdout.close()\nsys.stderr.close()\nraise ValueError('no shard')\n"
    assert node.run({"env": variables}, program) == 1
    assert "no shard" in node.spooled()


@EITHER
def test_an_elastic_script_that_ends_without_prepare_fails_with_the_reason(
    node: Node, variables: dict[str, str]
) -> None:
    size = {"resources": {"num_workers": 2}, "elastic": {"min_workers": 1}}
    assert node.run({"env": variables}, "print(1)\n", world_size=2, **size) == 1
    told = node.spooled()
    assert '"cannot_run"' in told
    assert "call it, or remove elastic" in told


def test_a_missing_module_is_no_reason_for_another_try(node: Node) -> None:
    environment = {"env": {"PYTHONHASHSEED": "7"}}
    assert node.run(environment, "import no_such_module_here\n") == 1
    assert '"cannot_run"' in node.spooled()
    assert "add it to environment.python_packages" in node.spooled()


def test_an_environment_that_is_gone_is_the_infrastructures(node: Node) -> None:
    assert node.run({"python_packages": ["hello"]}, "print(1)\n") == STORAGE_EXIT_CODE
    told = node.spooled()
    assert '"infrastructure"' in told
    assert "no longer on this node" in told
