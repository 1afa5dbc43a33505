"""JobSpec: the one document that a user writes.

The API validates the document, the service stores it, and the workers train by it; all three use
these classes. Unknown fields are refused, and so are numbers written as strings or booleans, and
features that this version does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, StringConstraints, model_validator

from dray.spec import environment, federated, roles
from dray.spec.code import RemoteCode
from dray.spec.data import Data, Format, Missing
from dray.spec.environment import Environment
from dray.spec.federated import Federated
from dray.spec.fields import (
    MAX_STEPS,
    Document,
    GpuShare,
    Int,
    LabelKey,
    LabelValue,
    MetricName,
    Name,
    NodeLabelValue,
    QueueName,
    Seconds,
    Size,
    wrong,
)
from dray.spec.metrics import Metric
from dray.spec.model import Cnn, Gpt, Imported, Mlp, Model, ResNet, Unet
from dray.spec.ordering import After, Afters, Array
from dray.spec.parallel import INNER, MAX_WORKERS, Parallel, written_out
from dray.spec.profile import Profile
from dray.spec.recipes import RECIPES, RecipeName
from dray.spec.script import Script
from dray.spec.sweep import Parameter, SuccessiveHalving, Sweep, Values, with_values
from dray.spec.sync import (
    AllReduce,
    AutoSync,
    Compression,
    Correction,
    Gossip,
    Outer,
    ParameterServer,
    ServerResources,
    Sync,
    with_kind,
)
from dray.spec.train import (
    EarlyStopping,
    Ema,
    LrScaling,
    OnDivergence,
    Optimizer,
    Schedule,
    Train,
)

__all__ = [
    "MAX_STEPS",
    "MAX_WORKERS",
    "RECIPES",
    "SPEC_VERSION",
    "After",
    "AllReduce",
    "Array",
    "AutoSync",
    "Checkpoint",
    "Cnn",
    "Compression",
    "Correction",
    "Data",
    "Document",
    "EarlyStopping",
    "Elastic",
    "Ema",
    "Environment",
    "Federated",
    "Format",
    "Gossip",
    "Gpt",
    "Imported",
    "InitFrom",
    "JobSpec",
    "LrScaling",
    "Metric",
    "Missing",
    "Mlp",
    "Model",
    "OnDivergence",
    "Optimizer",
    "Outer",
    "Parallel",
    "Parameter",
    "ParameterServer",
    "Profile",
    "RecipeName",
    "ResNet",
    "Resources",
    "Schedule",
    "Script",
    "ServerResources",
    "SuccessiveHalving",
    "Sweep",
    "Sync",
    "Train",
    "Unet",
]

SPEC_VERSION: Final = 1
_NOT_ONE = (
    "give exactly one of recipe and script: recipe: "
    f"{' or '.join(RECIPES)}; or script: {{entrypoint: FILE}}"
)


class Resources(Document):
    """Resources of the group. All workers start together or not at all."""

    num_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)] = 1
    """Ranks of the job: processes that train together. Parameter servers are among them."""
    gpus_per_worker: GpuShare = 0
    """0 trains on CPU; 1 gives each rank a GPU of its own; a part such as 0.5 shares each GPU with
    other jobs, and needs `share_gpus`. Two ranks of one job never share a GPU."""
    share_gpus: StrictBool = False
    """Accept that other jobs run on the same GPUs. Each process may take its part of a GPU's
    memory, and its speed depends on what the others do."""
    cpus_per_worker: Annotated[Int, Field(ge=1, le=1024)] = 1
    """CPU cores of each worker."""
    memory_bytes: Size | None = None
    """Memory of each worker, as Ray accounts for it; a number, or a size such as `8GiB`."""
    accelerator: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    """Ray's accelerator type, such as `H100`."""
    node_labels: Annotated[dict[LabelKey, NodeLabelValue], Field(max_length=8)] = {}
    """Labels of Ray's that the nodes of its workers have. `{ray.io/market-type: on-demand}` keeps a
    job off spot nodes, where these are labelled."""
    required_topology: LabelKey | None = None
    """Level of the cluster's topology, such as `rack`, of which one domain must hold all workers;
    `node` puts them on one node. Unset, they are as near each other as there is room."""


class Elastic(Document):
    """The group may be smaller than `resources.num_workers`: it starts with the free slots, goes on
    without lost workers, and grows again when slots are free. The batch size and the order of the
    samples do not change. For recipes on CPU, and scripts on CPU that call `train.prepare`."""

    min_workers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
    """Least number of workers to start and to go on with; at most `resources.num_workers`."""
    exact: StrictBool = False
    """Makes the weights equal to the last bit at any size, at some cost: gradients are computed in
    `resources.num_workers` shares and added in their order, on any number of workers."""
    by_speed: StrictBool = True
    """Whether the size of a recipe is chosen by the step times that it reports: it gives slots up,
    or leaves for a while, where other elastic jobs gain more by them. If false, it gets free slots
    and leaves them as jobs do that are not elastic."""


class Checkpoint(Document):
    """When checkpoints are saved and how many are kept."""

    every_steps: Literal["auto"] | Annotated[Int, Field(ge=1, le=MAX_STEPS)] | None = None
    """Optimizer steps between two checkpoints; unset, one is saved at the end of each epoch. `auto`
    chooses the interval by the cost of a save and the rate at which workers are lost."""
    keep: Annotated[Int, Field(ge=1, le=1000)] = 3
    """Number of newest checkpoints to keep, besides the best one."""
    best: MetricName | None = None
    """Metric that names the best checkpoint. Losses, errors and perplexity are minimised, other
    metrics maximised."""


class InitFrom(Document):
    """Start from another job's checkpoint."""

    job: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^job-[0-9a-z]+$")]
    """Id of the other job."""
    step: Literal["latest", "best"] | Annotated[Int, Field(ge=0, le=MAX_STEPS)] = "latest"
    """Step of the checkpoint, looked up when this job is submitted. `best` is the best by the other
    job's `checkpoint.best`."""
    take: Literal["weights", "everything"] = "weights"
    """weights: optimizer and step start anew. everything: the job continues after that step as if
    the checkpoint were its own, with the optimizer's state and the position in the data, on any
    number of workers and with any division of the model."""


class JobSpec(Document):
    """A training job: exactly one of `recipe` and `script`, and what it needs to run."""

    version: Literal[1] = SPEC_VERSION
    """Version of the document's format."""
    name: Name = "job"
    """Name of the job, which need not be unique."""
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = {}
    """Keys and values by which jobs can be listed and chosen."""
    recipe: RecipeName | None = None
    """Training program that comes with dray; instead of `script`."""
    script: Script | None = None
    """A training script of your own; instead of `recipe`."""
    model: Model | None = None
    """The model; by default the recipe's first one."""
    data: Data = Data()
    train: Train = Train()
    parallel: Annotated[
        Parallel, BeforeValidator(written_out, json_schema_input_type=Parallel | Literal["auto"])
    ] = Parallel()
    """How the model is divided; `auto`: the planner chooses the axes at the submit."""
    sync: Annotated[
        Sync | None,
        BeforeValidator(with_kind, json_schema_input_type=Sync | Literal["auto"] | None),
    ] = None
    """How the ranks keep their copies of the model in step; unset, by an all-reduce of the
    gradients in every step, uncompressed. `auto`: the service chooses the kind at the submit."""
    federated: Federated | None = None
    """Whether clients with data of their own train; unset, all ranks train on all samples."""
    resources: Resources = Resources()
    elastic: Elastic | None = None
    """Whether the group may change its size; unset, the size is fixed."""
    checkpoint: Checkpoint = Checkpoint()
    init_from: InitFrom | None = None
    environment: Environment | None = None
    """Packages and variables of the ranks; unset, those of their nodes."""
    profile: Profile | None = None
    """Steps to profile; unset, none."""
    metrics: Annotated[list[Metric], Field(max_length=64)] = []
    """Metrics of a script that does not report them itself."""
    after: Afters = []
    """Jobs that must end before this one starts, each an object or the id alone."""
    array: Array | None = None
    """Makes many jobs of this document; unset, one."""
    sweep: Sweep | None = None
    """Makes many jobs of this document, which differ by the values of parameters; unset, one."""
    queue: QueueName = "default"
    """The queue in which the job waits, by whose rules it starts; `dray queue ls` lists them."""
    priority: Annotated[Int, Field(ge=0, le=100)] = 50
    """Jobs of higher priority start first; of equal ones those with the least work left. At most
    the queue's `max_priority`."""
    max_retries: Annotated[Int, Field(ge=0, le=100)] = 1
    """Number of retries after an error of the training code. Failures of the cluster have a
    separate budget, and preemptions are free."""
    max_runtime_s: Seconds | None = None
    """Most seconds of running time over all attempts, after which the job fails; a number, or a
    time such as `2h`."""

    @property
    def num_jobs(self) -> int:
        """Number of jobs that the document makes."""
        if self.sweep is not None:
            return self.sweep.num_trials
        return 1 if self.array is None else self.array.size

    @property
    def arguments(self) -> list[str]:
        """Those of the script, and of its roles that have their own."""
        if self.script is None:
            return []
        of_roles = [role.args or () for role in self.script.roles.values()]
        return [argument for some in (self.script.args, *of_roles) for argument in some]

    def of_trial(self, values: Values) -> dict[str, Any]:
        """The document of a trial of the sweep as the user would write it, not yet checked."""
        own = self.model_dump(mode="json", exclude_unset=True, exclude={"sweep"})
        return with_values(own, values)

    @property
    def _recipe_metrics(self) -> tuple[str, ...]:
        """Those that an evaluation of the recipe reports."""
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
        """All ranks but the parameter servers, which are the last ones."""
        num_servers = self.sync.servers if isinstance(self.sync, ParameterServer) else 0
        return self.resources.num_workers - num_servers

    @property
    def compression(self) -> Compression | None:
        """Of the gradients that ranks exchange."""
        return self.sync.compression if isinstance(self.sync, AllReduce) else None

    @property
    def outer(self) -> Outer | None:
        """The optimizer of the averages after local steps."""
        return self.sync.outer if isinstance(self.sync, AllReduce) else None

    @property
    def takes_local_steps(self) -> bool:
        """Whether ranks take steps by themselves between two averages of all."""
        return isinstance(self.sync, AllReduce) and self.sync.every > 1

    @property
    def copies_differ(self) -> bool:
        """Whether each rank has weights, and a state of the optimizer, of its own."""
        return self.takes_local_steps or isinstance(self.sync, Gossip)

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
        return federated.with_num_workers(roles.with_num_workers(document))

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
        self._check_mesh()
        self._check_gpus()
        self._check_elastic()
        self._check_sync()
        federated.check(self)
        self._check_balance()
        self._check_noise()
        self._check_batch_range()
        self._check_profile()
        self._check_metrics()
        self._check_sweep()
        if self.recipe is None:
            if self.init_from is not None:
                raise wrong("/init_from", "is for recipes; a script loads what it wants itself")
            return self
        if self.environment is not None:
            environment.check_recipe(self.environment)
        best, metrics = self.checkpoint.best, self._recipe_metrics
        RECIPES[self.recipe].check(self.model, self.data, self.train, best, metrics)
        self._check_imported()
        self._check_blocks()
        self._check_optimizer_state()
        self._check_sent_types()
        self._check_batch()
        return self

    def _check_batch(self) -> None:
        """Each worker with a share of the batch must get at least one sample."""
        if set(self.parallel.auto) & set(INNER):
            return  # the planner may choose axes that do not divide the batch
        if isinstance(self.sync, ParameterServer) and self.sync.mode != "synchronous":
            return  # a worker computes a whole batch
        sharing = self.num_replicas * self.parallel.shard
        size = self.train.global_batch_size
        if size < sharing:
            raise wrong(
                "/train/global_batch_size",
                f"is {size}, fewer than one sample for each of {sharing} workers: make it "
                f"{sharing} or more, or take {size} workers or fewer",
            )

    def _check_noise(self) -> None:
        """The gradients of the ranks are compared with their mean, as DDP has both."""
        if not self.train.measure_noise:
            return
        at = "/train/measure_noise"
        if self.script is not None:
            raise wrong(at, "is for recipes; a script measures its gradients itself")
        if self.resources.num_workers == 1:
            raise wrong(at, "needs resources.num_workers 2 or more, whose gradients it compares")
        if self.is_divided or self.parallel.auto:
            raise wrong(at, "is for data parallelism, where each worker has the whole model")
        if self.is_exact or self.parallel.balance != "even" or self.sync is not None:
            raise wrong(at, "is not for elastic.exact, sync and balance: auto in this version")
        if self.train.precision == "fp16":
            raise wrong(at, "needs train.precision fp32 or bf16: fp16 scales the gradients")

    def _check_batch_range(self) -> None:
        """A range is for groups that are regrouped, and chosen by what they measure."""
        if self.train.batch_range is None:
            return
        (least, most), size = self.train.batch_range, self.train.global_batch_size
        at = "/train/batch_range"
        if self.script is not None:
            raise wrong(at, "is for recipes; a script makes its batches itself")
        if not least <= size <= most:
            raise wrong(at, f"must hold train.global_batch_size, which is {size}")
        if size % least or most % least:
            raise wrong(at, f"must have global_batch_size and its end as multiples of {least}")
        if least < self.resources.num_workers:
            workers = self.resources.num_workers
            raise wrong(at, f"must begin with {workers} or more, a sample for each worker")
        if self.elastic is None or not self.elastic.by_speed:
            raise wrong(at, "needs elastic with by_speed: the batch changes with the group's size")
        if not self.train.measure_noise:
            raise wrong(at, "needs train.measure_noise: the batch is chosen by the noise scale")
        taken = {
            "train.ema": self.train.ema is not None,
            "profile": self.profile is not None,
            "checkpoint.every_steps: auto": self.checkpoint.every_steps == "auto",
        }
        for name in [name for name, is_taken in taken.items() if is_taken]:
            raise wrong(at, f"is not for {name}, which counts the optimizer's steps")

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        if self.script is not None:
            raise wrong("/profile", "is for recipes; a script calls torch.profiler itself")
        num_workers = self.resources.num_workers
        if max(self.profile.ranks) >= num_workers:
            message = f"must be below resources.num_workers, which is {num_workers}"
            raise wrong("/profile/ranks", message)

    def _check_metrics(self) -> None:
        if self.metrics and self.script is None:
            raise wrong("/metrics", "is for scripts; a recipe reports its metrics itself")
        num_workers = self.resources.num_workers
        for number, metric in enumerate(self.metrics):
            if metric.rank != "all" and metric.rank >= num_workers:
                message = f"must be below resources.num_workers, which is {num_workers}"
                raise wrong(f"/metrics/{number}/rank", message)

    def _check_sweep(self) -> None:
        if self.sweep is None:
            return
        if self.array is not None:
            raise wrong("/array", "is not for sweeps, which make their own jobs: leave it out")
        self.sweep.check_program(self.recipe, self._recipe_metrics, self.arguments)

    def _check_balance(self) -> None:
        if self.parallel.balance == "even":
            return
        if self.script is not None:
            raise wrong(
                "/parallel/balance", "is for recipes; a script shares its batches out itself"
            )
        if self.is_exact:
            raise wrong(
                "/parallel/balance", "must be even with elastic.exact: its shares are equal"
            )
        has_servers = isinstance(self.sync, ParameterServer)
        if self.compression is not None or self.copies_differ or has_servers:
            raise wrong(
                "/parallel/balance",
                "must be even with sync.compression and sync.every, and with sync.kind other than "
                "all_reduce",
            )

    def _check_imported(self) -> None:
        if not isinstance(self.model, Imported):
            return
        if self.elastic is not None:
            raise wrong("/elastic", "is for the models of dray, which every node has")
        if self.parallel.shard > 1 and self.parallel.zero != 1:
            raise wrong(
                "/parallel/zero",
                "must be 1 for a model of your own, which is whole on every rank: dray does not "
                "know its blocks",
            )
        if self.init_from is not None:
            raise wrong("/init_from", "is for the models of dray; load weights in your own class")
        if self.recipe != "language_model":
            for name in ("context_length", "tokenizer"):
                if getattr(self.model, name) is not None:
                    raise wrong(f"/model/{name}", "is for language_model")

    def _check_blocks(self) -> None:
        if self.train.compile and self.parallel.schedule == "zero_bubble":
            raise wrong(
                "/train/compile",
                "must be false with the schedule zero_bubble, which goes backward through a block "
                "twice",
            )
        if self.train.compile and self.parallel.tensor > 1:
            raise wrong(
                "/train/compile",
                "must be false with parallel.tensor: torch loses track of which rank has what",
            )
        if self.train.recompute == "none":
            return
        if not isinstance(self.model, Gpt | ResNet | Unet):
            raise wrong("/train/recompute", "is for models made of blocks: gpt, resnet, unet")
        if self.parallel.schedule == "zero_bubble":
            raise wrong(
                "/train/recompute",
                "must be none with the schedule zero_bubble, which goes backward through a block "
                "twice",
            )

    def _check_optimizer_state(self) -> None:
        optimizer, resources = self.train.optimizer, self.resources
        if optimizer.offload:
            name = "offload"
        elif optimizer.state_dtype == "bf16":
            name = "state_dtype"
        else:
            return
        at = f"/train/optimizer/{name}"
        if optimizer.name == "adafactor":
            raise wrong(at, "is for state as large as the weights: adafactor's is small")
        if optimizer.name == "sgd" and not optimizer.momentum:
            raise wrong(at, "is for what an optimizer remembers: sgd without momentum has nothing")
        compression = self.compression
        if optimizer.name == "sgd" and compression is not None and compression.name == "topk":
            raise wrong(at, "is for what an optimizer remembers: topk keeps the momentum itself")
        if self.parallel.shard > 1 and self.parallel.zero == 1:
            raise wrong(at, "needs parallel.zero 2 or 3: torch's ZeRO 1 keeps its state itself")
        if optimizer.offload and not resources.gpus_per_worker:
            raise wrong(at, "needs gpus_per_worker 1: on CPU it is there already")

    def _check_sent_types(self) -> None:
        parallel = self.parallel
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(parallel, name) == "fp32":
                continue
            if not parallel.is_sharded or parallel.zero == 1:
                raise wrong(
                    f"/parallel/{name}",
                    "is for what FSDP sends: with parallel.shard or context above 1, and zero 2 or "
                    "3; among replicas sync.compression bf16 does it",
                )
        param, precision = parallel.param_dtype, self.train.precision
        if param not in ("fp32", precision):
            raise wrong(
                "/parallel/param_dtype", f"needs train.precision {param}, which computes so"
            )
        if parallel.reduce_dtype == "fp16" and precision != "fp16":
            raise wrong(
                "/parallel/reduce_dtype",
                "fp16 needs train.precision fp16, whose loss scale keeps small gradients: or take "
                "bf16",
            )

    def _check_mesh(self) -> None:
        self.parallel.check(self.resources.num_workers)
        if self.parallel.auto and self.script is not None:
            raise wrong("/parallel", "is for recipes; a script divides its model itself")
        if self.parallel.auto and self.elastic is not None:
            raise wrong("/elastic", "is not for parallel: auto, which plans for a fixed size")
        if self.is_divided:
            self._check_divided()
            if self.model is not None:
                self.parallel.check_model(self.model)

    def _check_divided(self) -> None:
        train = self.train
        axis = "shard" if self.parallel.shard > 1 else self.parallel.inner_axes[0]
        alone = f"needs parallel.{axis} 1"
        if self.elastic is not None:
            raise wrong("/elastic", f"{alone}: no rank has the whole state")
        if self.script is not None:
            self._check_divided_script(self.script)
            return
        if self.copies_differ:
            at = "/sync/every" if self.takes_local_steps else "/sync/kind"
            raise wrong(at, f"{alone}: no rank has the whole state")
        if self.checkpoint.every_steps == "auto":
            raise wrong(
                "/checkpoint/every_steps",
                f"must be a number with parallel.{axis}: all ranks save together",
            )
        if self.parallel.zero == 1:
            return  # weights and gradients are whole everywhere
        instead = ", or take parallel.zero 1" if not self.parallel.inner_axes else ""
        if self.compression is not None:
            why = ": it is for gradients that each rank has whole"
            if self.parallel.is_sharded:
                why = (
                    f"{instead}: FSDP2 adds up parts, for which torch has none of these; "
                    "parallel.reduce_dtype bf16 sends half"
                )
            raise wrong("/sync/compression", f"{alone}{why}")
        if train.ema is not None:
            raise wrong("/train/ema", f"{alone} in this version of dray{instead}")
        if train.optimizer.name not in ("adamw", "sgd"):
            raise wrong(
                "/train/optimizer/name",
                f"must be adamw or sgd with parallel.{axis}{instead}: {train.optimizer.name} looks "
                "at whole layers",
            )

    def _check_divided_script(self, script: Script) -> None:
        """`train.prepare` divides its model along the axes `data`, `shard` and `tensor`."""
        for axis in ("pipeline", "context"):
            if getattr(self.parallel, axis) > 1:
                raise wrong(
                    f"/parallel/{axis}",
                    "is for recipes; train.prepare() takes parallel.shard and parallel.tensor",
                )
        if script.framework != "torch" or script.roles:
            raise wrong("/parallel", "divides the model of a script of torch without roles")
        if self.parallel.zero != 3:
            raise wrong("/parallel/zero", "must be 3 for a script: train.prepare() uses FSDP2")
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self.parallel, name) != "fp32":
                raise wrong(f"/parallel/{name}", "is for recipes; train.prepare() sends fp32")

    def _check_sync(self) -> None:
        compression = self.compression
        if self.sync is not None and self.script is not None:
            raise wrong("/sync", "is for recipes; a script exchanges its gradients itself")
        continues = self.init_from is not None and self.init_from.take == "everything"
        if isinstance(self.sync, AutoSync) and continues:
            raise wrong(
                "/sync",
                "must not be auto with init_from.take everything: give the other job's sync, with "
                "which the job goes on",
            )
        if self.copies_differ:
            self._check_differing_copies()
        if isinstance(self.sync, Gossip):
            self.sync.check(self.resources.num_workers)
            self._check_asynchronous(self.sync)
        if isinstance(self.sync, ParameterServer):
            self._check_servers(self.sync)
        if compression is None:
            return
        if self.is_exact:
            raise wrong(
                "/sync/compression",
                "is not for elastic.exact: each rank leaves out something else",
            )
        optimizer = self.train.optimizer
        if self.train.on_divergence == "skip_step" and compression.name in ("topk", "powersgd"):
            raise wrong(
                "/train/on_divergence",
                f"must not be skip_step with {compression.name}, which keeps what it does not "
                "send: also a gradient that is not finite. Take rollback",
            )
        if self.train.precision == "fp16" and compression.name in ("topk", "powersgd"):
            raise wrong(
                "/train/precision",
                f"must be fp32 or bf16 with {compression.name}, which keeps what it does not send: "
                "also a gradient that overflowed",
            )
        if compression.name == "topk" and optimizer.nesterov:
            raise wrong(
                "/train/optimizer/nesterov",
                "is not for topk, which takes the momentum over: set it to false",
            )
        if compression.name == "topk" and optimizer.name == "lars":
            raise wrong("/sync/compression/name", "must not be topk with lars: use sgd or lamb")

    def _check_servers(self, sync: ParameterServer) -> None:
        """The servers know vectors: no tensors, no samples and no losses."""
        train = self.train
        sync.check(self.resources.num_workers)
        chosen = "with sync.kind parameter_server"
        if self.is_divided or self.parallel.auto:
            raise wrong("/parallel", f"must be unset {chosen}: each worker has the whole model")
        if self.elastic is not None:
            raise wrong("/elastic", f"is not for this job: {chosen} the size is fixed")
        gpus = self.resources.gpus_per_worker
        if gpus and sync.server_resources is None:
            raise wrong(
                "/sync/server_resources",
                "must be given with gpus_per_worker, because servers use no GPU: such as "
                "`{cpus: 2}`. Or take gpus_per_worker 0",
            )
        if 0 < gpus < 1:
            raise wrong(
                "/resources/gpus_per_worker", f"must be 0 or 1 {chosen}: servers share no GPU"
            )
        if sync.server_resources is not None and self.resources.required_topology is not None:
            raise wrong(
                "/resources/required_topology",
                "must be unset with sync.server_resources in this version: it is for slots that "
                "are alike",
            )
        if train.precision == "fp16":
            raise wrong("/train/precision", f"must be fp32 or bf16 {chosen}: no loss is scaled")
        if train.ema is not None:
            raise wrong("/train/ema", f"must be unset {chosen}, which keep no average")
        if train.on_divergence == "skip_step":
            raise wrong(
                "/train/on_divergence",
                f"must not be skip_step {chosen}, which add up what they get: take rollback",
            )
        if self.profile is not None:
            raise wrong("/profile", f"must be unset {chosen}: workers do not take the same steps")
        optimizer = train.optimizer
        if optimizer.name not in ("adamw", "sgd"):
            raise wrong(
                "/train/optimizer/name",
                f"must be adamw or sgd {chosen}: {optimizer.name} looks at whole layers, which "
                "servers do not have",
            )
        if optimizer.state_dtype != "fp32":
            raise wrong("/train/optimizer/state_dtype", f"must be fp32 {chosen}")
        if self.data.loader_workers and sync.mode != "synchronous":
            raise wrong(
                "/data/loader_workers",
                f"must be 0 with sync.mode {sync.mode}: a worker learns before each step which "
                "samples it computes",
            )
        if train.max_grad_norm is not None and sync.mode == "synchronous":
            raise wrong(
                "/train/max_grad_norm",
                "must be unset with synchronous parameter servers, of which none has the whole "
                "gradient: leave it out, or take sync.mode asynchronous or bounded",
            )

    def _check_asynchronous(self, sync: Gossip) -> None:
        if sync.mode != "ad_psgd":
            return
        if self.resources.gpus_per_worker:
            raise wrong(
                "/resources/gpus_per_worker",
                "must be 0 with ad_psgd, which averages on CPU in this version: or take d_psgd or "
                "sgp",
            )
        if self.data.loader_workers:
            raise wrong(
                "/data/loader_workers",
                "must be 0 with ad_psgd: its ranks learn during a step which samples they compute",
            )

    def _check_differing_copies(self) -> None:
        assert self.sync is not None
        chosen = "sync.every above 1" if self.takes_local_steps else f"sync.kind {self.sync.kind}"
        why = f"with {chosen} the ranks have no common weights in between"
        if self.elastic is not None:
            raise wrong("/elastic", f"must be unset: {why} to change the size with")
        if self.train.ema is not None:
            raise wrong("/train/ema", f"must be unset: {why} to average")
        if self.checkpoint.every_steps == "auto":
            raise wrong("/checkpoint/every_steps", f"must be a number: {why} to save")

    def _check_gpus(self) -> None:
        share, accepts = self.resources.gpus_per_worker, self.resources.share_gpus
        if 0 < share < 1 and not accepts:
            at = "/resources/share_gpus"
            raise wrong(at, f"must be true for {share:g} of a GPU: other jobs have the rest of it")
        if accepts and share in (0, 1):
            at = "/resources/share_gpus"
            raise wrong(at, "is for a part of a GPU: give gpus_per_worker as 0.5, say")

    def _check_elastic(self) -> None:
        if self.elastic is None:
            return
        least, most = self.elastic.min_workers, self.resources.num_workers
        if least > most:
            raise wrong(
                "/elastic/min_workers",
                f"is {least}, more than the {most} of resources.num_workers",
            )
        if self.script is not None and self.script.roles:
            raise wrong("/elastic", "is not for roles, whose sizes are fixed")
        if self.script is not None and self.elastic.exact:
            raise wrong("/elastic/exact", "is for recipes; of a script dray does not know the loss")
        if self.resources.gpus_per_worker:
            raise wrong(
                "/elastic", "needs gpus_per_worker 0: this version of dray resizes groups on CPU"
            )
        rule = self.train.early_stopping
        if self.elastic.exact and rule is not None and rule.metric != "val/loss":
            raise wrong(
                "/train/early_stopping/metric",
                "must be val/loss with elastic.exact: other metrics are added up in an order that "
                "depends on the world size, so a run could stop elsewhere",
            )
        if self.parallel.data != "auto":
            raise wrong("/parallel/data", "must be auto: an elastic job has no fixed world size")
