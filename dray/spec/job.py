"""JobSpec: the whole document. Its parts have files of their own.

A check of one part is in the part's class; a check of several parts is in `dray.spec.checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dray.spec.checkpoint import Checkpoint, InitFrom
from dray.spec.checks import copies, division, group, training
from dray.spec.federated import job_checks
from dray.spec.federated.document import Federated
from dray.spec.fields import Document, Int, LabelKey, LabelValue, Name, QueueName, Seconds, wrong
from dray.spec.ordering import Afters, Array
from dray.spec.program import environment, roles
from dray.spec.program.code import RemoteCode
from dray.spec.program.environment import Environment
from dray.spec.program.metrics import Metric
from dray.spec.program.model import Imported, Model
from dray.spec.program.recipes import RECIPES, RecipeName
from dray.spec.program.script import Script
from dray.spec.resources import Elastic, Resources, RoleRanks
from dray.spec.sweep import Sweep, Values, with_values
from dray.spec.training.data import Data
from dray.spec.training.parallel import Parallel, written_out
from dray.spec.training.sync import (
    AllReduce,
    Compression,
    Outer,
    ParameterServer,
    Sync,
    with_kind,
)
from dray.spec.training.train import Profile, Train

SPEC_VERSION: Final = 1
_NOT_ONE = (
    "give exactly one of recipe and script: recipe: "
    f"{' or '.join(RECIPES)}; or script: {{entrypoint: FILE}}"
)


class JobSpec(Document):
    """A training job: exactly one of `recipe` and `script`, and the settings of the run."""

    version: Literal[1] = SPEC_VERSION
    """Version of the document's format."""
    name: Name = "job"
    """Name of the job, which need not be unique."""
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = {}
    """Keys and values by which jobs can be listed and selected."""
    recipe: RecipeName | None = None
    """Training program that comes with dray; instead of `script`."""
    script: Script | None = None
    """A training script of your own; instead of `recipe`."""
    model: Model | None = None
    """The model; by default the first model of the recipe."""
    data: Data = Data()
    train: Train = Train()
    parallel: Annotated[
        Parallel, BeforeValidator(written_out, json_schema_input_type=Parallel | Literal["auto"])
    ] = Parallel()
    """How the model is divided; `auto`: the planner chooses the axes when the job is submitted."""
    sync: Annotated[
        Sync | None,
        BeforeValidator(with_kind, json_schema_input_type=Sync | Literal["auto"] | None),
    ] = None
    """How the ranks keep their copies of the model in sync; unset, by an uncompressed all-reduce of
    the gradients in every step. `auto`: the service chooses the kind when the job is submitted."""
    federated: Federated | None = None
    """Federated learning, in which clients train on their own data; unset, all ranks train on all
    samples."""
    resources: Resources = Resources()
    elastic: Elastic | None = None
    """How the group may change its size; unset, the size is fixed."""
    checkpoint: Checkpoint = Checkpoint()
    init_from: InitFrom | None = None
    environment: Environment | None = None
    """Packages and environment variables of the ranks, in addition to their nodes' own."""
    profile: Profile | None = None
    """Steps to profile; unset, none."""
    metrics: Annotated[list[Metric], Field(max_length=64)] = []
    """Metrics of a script that does not report them itself."""
    after: Afters = []
    """Jobs that must end before this one starts, each as an object or only an id."""
    array: Array | None = None
    """Makes many jobs from this document; unset, one job."""
    sweep: Sweep | None = None
    """Makes many jobs from this document, which differ in the values of parameters; unset, one
    job."""
    queue: QueueName = "default"
    """The queue in which the job waits; `dray queue ls` lists the queues and their rules."""
    priority: Annotated[Int, Field(ge=0, le=100)] = 50
    """Jobs with a higher priority start first; among jobs of equal priority, the job with the least
    remaining work. At most the queue's `max_priority`."""
    max_retries: Annotated[Int, Field(ge=0, le=100)] = 1
    """Number of retries after an error of the training code. Failures of the cluster have a
    separate budget, and preemptions are free."""
    max_runtime_s: Seconds | None = None
    """Running time over all attempts, in seconds, after which the job fails; a number, or a time
    such as `2h`."""

    @property
    def num_jobs(self) -> int:
        """Number of jobs that the document makes."""
        if self.sweep is not None:
            return self.sweep.num_trials
        return 1 if self.array is None else self.array.size

    @property
    def arguments(self) -> list[str]:
        """Arguments of the script, and of the roles that have their own arguments."""
        if self.script is None:
            return []
        of_roles = [role.args or () for role in self.script.roles.values()]
        return [argument for some in (self.script.args, *of_roles) for argument in some]

    def of_trial(self, values: Values) -> dict[str, Any]:
        """Return the document of a trial of the sweep as a user would write it, not validated."""
        own = self.model_dump(mode="json", exclude_unset=True, exclude={"sweep"})
        return with_values(own, values)

    @property
    def _recipe_metrics(self) -> tuple[str, ...]:
        """Metrics that an evaluation of the recipe reports."""
        if self.recipe is None:
            return ()
        options = RECIPES[self.recipe]
        given = self.federated
        is_simulated = given is not None and given.http is None and given.silos is None
        return options.client_metrics if is_simulated else options.metrics

    @property
    def is_exact(self) -> bool:
        return self.elastic is not None and self.elastic.exact

    @property
    def code(self) -> str | None:
        """The id of the uploaded code that the job brings."""
        if self.script is not None:
            return self.script.code if isinstance(self.script.code, str) else None
        return self.model.code if isinstance(self.model, Imported) else None

    @property
    def remote_code(self) -> RemoteCode | None:
        """The code that nodes fetch from elsewhere."""
        code = None if self.script is None else self.script.code
        return code if isinstance(code, RemoteCode) else None

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold parts of the model."""
        return self.parallel.num_parts > 1

    @property
    def num_replicas(self) -> int:
        """Number of ranks that train the same part of the model."""
        return self.num_ranks_that_train // self.parallel.num_parts

    @property
    def num_ranks_that_train(self) -> int:
        """Number of ranks without the parameter servers, which are the last ranks."""
        num_servers = self.sync.servers if isinstance(self.sync, ParameterServer) else 0
        return self.resources.num_workers - num_servers

    @property
    def roles_with_resources(self) -> list[RoleRanks]:
        """The ranks of each role whose resources differ from `resources`."""
        if isinstance(self.sync, ParameterServer) and self.sync.server_resources is not None:
            servers = range(self.num_ranks_that_train, self.resources.num_workers)
            return [RoleRanks("server", servers, self.sync.server_resources)]
        return [] if self.script is None else roles.with_resources(self.script.roles)

    def num_cpus_of(self, rank: int) -> int:
        """Return the number of CPU cores of a rank."""
        own = (one.resources.cpus for one in self.roles_with_resources if rank in one.ranks)
        return next(own, self.resources.cpus_per_worker)

    @property
    def compression(self) -> Compression | None:
        """Compression of the gradients that ranks exchange."""
        return self.sync.compression if isinstance(self.sync, AllReduce) else None

    @property
    def outer(self) -> Outer | None:
        """The optimizer that is applied to the averages after local steps."""
        return self.sync.outer if isinstance(self.sync, AllReduce) else None

    @property
    def takes_local_steps(self) -> bool:
        """Whether ranks take independent steps between two averages of their weights."""
        return isinstance(self.sync, AllReduce) and self.sync.every > 1

    @property
    def copies_differ(self) -> bool:
        """Whether each rank has its own weights and its own optimizer state."""
        return self.sync is not None and self.sync.copies_differ

    @model_validator(mode="before")
    @classmethod
    def _the_recipes_own_model(cls, document: Any) -> Any:
        """Fill in the recipe's first model for a model without a name."""
        if not isinstance(document, Mapping):
            return document
        recipe, model = document.get("recipe"), document.get("model")
        if not isinstance(recipe, str) or recipe not in RECIPES:
            return document
        if isinstance(model, Mapping) and "import" in model and "name" not in model:
            return {**document, "model": {"name": "imported", **model}}
        if model is None or (isinstance(model, Mapping) and "name" not in model):
            return {**document, "model": {"name": RECIPES[recipe].models[0], **(model or {})}}
        return document

    @model_validator(mode="before")
    @classmethod
    def _the_workers_of_all_roles(cls, document: Any) -> Any:
        """Fill in `resources.num_workers` of a script with roles, and of silos."""
        return job_checks.with_num_workers(roles.with_num_workers(document))

    @model_validator(mode="after")
    def _one_thing_to_run(self) -> Self:
        if (self.recipe is None) == (self.script is None):
            raise ValueError(
                _NOT_ONE
                if self.recipe is None
                else "give exactly one of recipe and script, not both"
            )
        if self.script is not None:
            roles.check_num_workers(self.script.roles, self.resources.num_workers)
        division.check_mesh(self)
        group.check_gpus(self)
        group.check_roles(self)
        group.check_elastic(self)
        copies.check(self)
        job_checks.check(self)
        division.check_balance(self)
        training.check_noise(self)
        training.check_batch_range(self)
        group.check_profile(self)
        group.check_metrics(self)
        self._check_sweep()
        if self.recipe is None:
            if self.init_from is not None:
                raise wrong("/init_from", "is for recipes; a script loads what it wants itself")
            return self
        if self.environment is not None:
            environment.check_recipe(self.environment)
        best, metrics = self.checkpoint.best, self._recipe_metrics
        RECIPES[self.recipe].check(self.model, self.data, self.train, best, metrics)
        training.check_imported(self)
        training.check_blocks(self)
        training.check_optimizer_state(self)
        division.check_sent_types(self)
        training.check_batch(self)
        return self

    def _check_sweep(self) -> None:
        if self.sweep is None:
            return
        if self.array is not None:
            raise wrong("/array", "is not for sweeps, which make their own jobs: leave it out")
        self.sweep.check_program(self.recipe, self._recipe_metrics, self.arguments)
