"""JobSpec: the complete document. The parts of the document are defined in separate files.

The class of each part validates that part. `dray.spec.checks` validates combinations of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from dray.spec.checkpoint import Check, Checkpoint, InitFrom, of_model
from dray.spec.checks import copies, division, fine_tuning, group, training
from dray.spec.federated import job_checks
from dray.spec.federated.document import Federated
from dray.spec.fields import (
    Document,
    Int,
    LabelKey,
    LabelValue,
    ModelVersion,
    Name,
    QueueName,
    ReservationName,
    Seconds,
    a_number,
    wrong,
)
from dray.spec.ordering import Afters, Array
from dray.spec.program import environment, roles
from dray.spec.program.code import RemoteCode
from dray.spec.program.environment import Environment
from dray.spec.program.metrics import Metric
from dray.spec.program.model import Imported, Model, Pretrained
from dray.spec.program.origin import DocumentOrigin
from dray.spec.program.recipes import METRICS_OF_METHOD, RECIPES, RecipeName
from dray.spec.program.script import Script
from dray.spec.resources import Elastic, Resources, RoleRanks
from dray.spec.sweep import Sweep
from dray.spec.times import Time, check_order, with_offsets
from dray.spec.training.data import Data
from dray.spec.training.method import Method, Sft
from dray.spec.training.parallel import Parallel, written_out
from dray.spec.training.sync import (
    AllReduce,
    Compression,
    Outer,
    ParameterServer,
    Sync,
    with_kind,
)
from dray.spec.training.text_samples import TextSamples
from dray.spec.training.train import Profile, Train
from dray.spec.trial_values import Values, with_values

SPEC_VERSION: Final = 1
_NOT_ONE = (
    f"specify exactly one of recipe and script: either recipe: {' or '.join(RECIPES)}; or script: "
    f"{{entrypoint: FILE}}"
)


class JobSpec(Document):
    """A training job: exactly one of `recipe` and `script`, and the settings of the run."""

    version: Annotated[Literal[1], BeforeValidator(a_number)] = SPEC_VERSION
    """Version of the document's format."""
    name: Name = "job"
    """Name of the job. Names need not be unique."""
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = {}
    """Key-value pairs for listing and selecting jobs."""
    recipe: RecipeName | None = None
    """Training program that is included in dray. Give either `recipe` or `script`."""
    script: Script | None = None
    """Your own training script. Give either `script` or `recipe`."""
    model: Model | None = None
    """The model to train. Defaults to the first model of the recipe."""
    method: Method | None = None
    """fine_tuning: how the model learns from the examples. The name of a method is a short form for
    the method with its defaults; the default is `sft`."""
    data: Data = Data()
    train: Train = Train()
    parallel: Annotated[
        Parallel, BeforeValidator(written_out, json_schema_input_type=Parallel | Literal["auto"])
    ] = Parallel()
    """How the model is divided among the ranks. With `auto`, the planner chooses the axes when the
    job is submitted."""
    sync: Annotated[
        Sync | None,
        BeforeValidator(with_kind, json_schema_input_type=Sync | Literal["auto"] | None),
    ] = None
    """How the ranks keep their copies of the model in sync. If unset, gradients are all-reduced
    without compression in every step. With `auto`, the service chooses the kind when the job is
    submitted."""
    federated: Federated | None = None
    """Federated learning, in which each client trains on its own data. If unset, all ranks train on
    all samples."""
    resources: Resources = Resources()
    elastic: Elastic | None = None
    """Limits within which the group can change its size. If unset, the size is fixed."""
    checkpoint: Checkpoint = Checkpoint()
    init_from: Annotated[
        InitFrom | None,
        BeforeValidator(of_model, json_schema_input_type=InitFrom | ModelVersion | None),
    ] = None
    environment: Environment | None = None
    """Packages and environment variables for the ranks, in addition to what their nodes provide."""
    check: Check | None = None
    """Checks for faults that raise no error, such as bits that change in the memory of a device. If
    unset, nothing is checked."""
    profile: Profile | None = None
    """Steps to profile. If unset, no step is profiled."""
    samples: TextSamples | None = None
    """fine_tuning with the method sft: prompts that the model answers at every evaluation. If
    unset, no text is generated."""
    metrics: Annotated[list[Metric], Field(max_length=64)] = []
    """Metrics to collect from a script that does not report metrics itself."""
    after: Afters = []
    """Jobs that must end before this job starts. Each entry is an object, or just the id of a
    job."""
    array: Array | None = None
    """Creates many jobs from this document. If unset, the document creates one job."""
    sweep: Sweep | None = None
    """Creates many jobs from this document, each with different parameter values. If unset, the
    document creates one job."""
    queue: QueueName = "default"
    """The queue in which the job waits; `dray queue ls` lists the queues and their rules."""
    priority: Annotated[Int, Field(ge=0, le=100)] = 50
    """Jobs with a higher priority start first. Among jobs of equal priority, the job with the least
    remaining work starts first. Must not exceed the queue's `max_priority`."""
    max_retries: Annotated[Int, Field(ge=0, le=100)] = 1
    """Number of retries after errors in the training code. Cluster failures have a separate budget,
    and preemptions are not counted."""
    max_runtime_s: Seconds | None = None
    """Maximum total running time of all attempts, after which the job fails. A number of seconds,
    or a duration such as `2h`. If unset, the queue's default applies, if it has one."""
    begin_at: Time | None = None
    """The job does not start before this time. A time in RFC 3339, such as
    `2026-12-01T08:00:00+01:00`. A time in the past has no effect."""
    deadline: Time | None = None
    """The job is cancelled at this time, or earlier if it has not started and its own
    `max_runtime_s` would end later. A running job saves its state first."""
    time_zone: str | None = None
    """Name of the time zone of those times in `begin_at` and `deadline` that have no offset from
    UTC, such as `Europe/Berlin`. The document is stored with offsets instead."""
    reservation: ReservationName | None = None
    """The reservation in which the job runs. It starts only on the reservation's nodes, between its
    begin and its end, unless the reservation is `flex`."""
    singleton: StrictBool = False
    """Whether the job waits until no other job of its owner with the same name runs or was
    submitted before it and still waits."""
    origin: DocumentOrigin | None = None
    """Where the document and its code come from. If unset, this is unknown."""

    @property
    def num_jobs(self) -> int:
        """Number of jobs that the document creates."""
        if self.sweep is not None:
            return self.sweep.num_trials
        return 1 if self.array is None else self.array.size

    @property
    def arguments(self) -> list[str]:
        """Arguments of the script and of its roles."""
        if self.script is None:
            return []
        of_roles = [role.args or () for role in self.script.roles.values()]
        return [argument for some in (self.script.args, *of_roles) for argument in some]

    def of_trial(self, values: Values) -> dict[str, Any]:
        """Return the document of one trial of the sweep, as a user would write it. It is not
        validated."""
        own = self.as_given()
        own.pop("sweep", None)
        return with_values(own, values)

    def as_given(self) -> dict[str, Any]:
        """Return the document without the fields that were not set."""
        return self._with_kinds(self.model_dump(mode="json", exclude_unset=True))

    def without_defaults(self) -> dict[str, Any]:
        """Return the document without the fields that have their default values."""
        return self._with_kinds(self.model_dump(mode="json", exclude_defaults=True))

    def _with_kinds(self, document: dict[str, Any]) -> dict[str, Any]:
        """Add the fields that select the classes of `sync`, `model` and `method`. A dump omits
        these fields if they were not set, or are the defaults of their classes."""
        if self.sync is not None and "sync" in document:
            document["sync"]["kind"] = self.sync.kind
        if self.model is not None and "model" in document:
            document["model"]["name"] = self.model.name
        if self.method is not None and "method" in document:
            document["method"]["name"] = self.method.name
        return document

    @property
    def _recipe_metrics(self) -> tuple[str, ...]:
        """Metrics that the recipe reports after an evaluation."""
        if self.recipe is None:
            return ()
        if self.recipe == "fine_tuning" and self.method is not None:
            own = self.method.metrics if isinstance(self.method, Sft) else {}
            return (*METRICS_OF_METHOD[self.method.name], *(f"val/{name}" for name in own))
        options = RECIPES[self.recipe]
        given = self.federated
        is_simulated = given is not None and given.http is None and given.silos is None
        return options.client_metrics if is_simulated else options.metrics

    @property
    def changes_size(self) -> bool:
        """Whether the number of ranks can change while the job runs."""
        return self.elastic is not None and self.elastic.min_workers is not None

    @property
    def num_spares(self) -> int:
        """Number of additional workers that replace lost ranks."""
        return 0 if self.elastic is None else self.elastic.spares

    @property
    def num_slots(self) -> int:
        """Number of slots of a complete group, including its spares."""
        return self.resources.num_workers + self.num_spares

    @property
    def is_exact(self) -> bool:
        return self.elastic is not None and self.elastic.exact

    @property
    def code(self) -> str | None:
        """The id of the job's uploaded code, if any."""
        if self.script is not None:
            return self.script.code if isinstance(self.script.code, str) else None
        return self.model.code if isinstance(self.model, Imported | Pretrained) else None

    @property
    def remote_code(self) -> RemoteCode | None:
        """The code that the nodes download from another server, if any."""
        code = None if self.script is None else self.script.code
        return code if isinstance(code, RemoteCode) else None

    @property
    def is_divided(self) -> bool:
        """Whether each rank holds only a part of the model."""
        return self.parallel.num_parts > 1

    @property
    def keeps_state_in_memory(self) -> bool:
        """Whether each rank's share of a divided model is copied to the memory of other ranks."""
        rule = self.checkpoint.in_memory
        if rule == "off" or (rule == "auto" and self.resources.gpus_per_worker):
            return False
        return copies.why_no_state_in_memory(self) is None

    @property
    def num_replicas(self) -> int:
        """Number of ranks that train the same part of the model."""
        return self.num_ranks_that_train // self.parallel.num_parts

    @property
    def num_ranks_that_train(self) -> int:
        """Number of ranks, not counting parameter servers. Parameter servers are the last ranks."""
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
        """Compression of the exchanged gradients."""
        return self.sync.compression if isinstance(self.sync, AllReduce) else None

    @property
    def outer(self) -> Outer | None:
        """The optimizer that is applied to the average after local steps."""
        return self.sync.outer if isinstance(self.sync, AllReduce) else None

    @property
    def takes_local_steps(self) -> bool:
        """Whether ranks take independent steps between the times at which they average their
        weights."""
        return isinstance(self.sync, AllReduce) and self.sync.every > 1

    @property
    def copies_differ(self) -> bool:
        """Whether each rank has its own weights and its own optimizer state."""
        return self.sync is not None and self.sync.copies_differ

    @model_validator(mode="before")
    @classmethod
    def _the_recipes_own_model(cls, document: Any) -> Any:
        """Set the name of the model, if it is unset, to the recipe's first model, and the method of
        fine-tuning to its default."""
        if not isinstance(document, Mapping):
            return document
        recipe, model = document.get("recipe"), document.get("model")
        if not isinstance(recipe, str) or recipe not in RECIPES:
            return document
        if recipe == "fine_tuning" and document.get("method") is None:
            document = {**document, "method": {}}
        if isinstance(model, Mapping) and "import" in model and "name" not in model:
            return {**document, "model": {"name": "imported", **model}}
        if model is None or (isinstance(model, Mapping) and "name" not in model):
            return {**document, "model": {"name": RECIPES[recipe].models[0], **(model or {})}}
        return document

    @model_validator(mode="before")
    @classmethod
    def _times_with_offsets(cls, document: Any) -> Any:
        return with_offsets(document)

    @model_validator(mode="before")
    @classmethod
    def _the_workers_of_all_roles(cls, document: Any) -> Any:
        """Fill in `resources.num_workers` for scripts with roles and for silos."""
        return job_checks.with_num_workers(roles.with_num_workers(document))

    @model_validator(mode="after")
    def _one_thing_to_run(self) -> Self:
        if (self.recipe is None) == (self.script is None):
            raise ValueError(
                _NOT_ONE
                if self.recipe is None
                else "specify exactly one of recipe and script, not both"
            )
        if self.script is not None:
            roles.check_num_workers(self.script.roles, self.resources.num_workers)
        division.check_mesh(self)
        group.check_gpus(self)
        group.check_roles(self)
        group.check_elastic(self)
        copies.check(self)
        job_checks.check(self)
        copies.check_comparison(self)
        division.check_balance(self)
        copies.check_in_memory(self)
        training.check_noise(self)
        training.check_batch_range(self)
        group.check_profile(self)
        group.check_metrics(self)
        self._check_sweep()
        check_order(self.begin_at, self.deadline)
        self._check_singleton()
        fine_tuning.check(self)
        if self.recipe is None:
            if self.init_from is not None:
                raise wrong("/init_from", "is only for recipes: a script loads its own checkpoints")
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

    def _check_singleton(self) -> None:
        if self.singleton and (self.array is not None or self.sweep is not None):
            many = "array" if self.sweep is None else "sweep"
            raise wrong(
                "/singleton",
                f"can't be combined with {many}, whose jobs have the same name: set "
                f"{many}.max_running to 1 instead",
            )

    def _check_sweep(self) -> None:
        if self.sweep is None:
            return
        if self.array is not None:
            raise wrong(
                "/array",
                "can't be combined with sweep, which creates its own jobs: leave this field out",
            )
        self.sweep.check_program(self.recipe, self._recipe_metrics, self.arguments)
