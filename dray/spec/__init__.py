"""JobSpec: the one document that a user writes.

The API validates the document, the service stores it, and the workers read their settings from it,
all with these classes. Unknown fields, numbers given as strings or booleans, and unsupported
features are rejected.
"""

from __future__ import annotations

from dray.spec.checkpoint import Checkpoint, InitFrom, InMemory
from dray.spec.federated.document import Federated
from dray.spec.fields import MAX_STEPS, Document
from dray.spec.job import SPEC_VERSION, JobSpec
from dray.spec.ordering import After, Array
from dray.spec.program.environment import Environment
from dray.spec.program.metrics import Metric
from dray.spec.program.model import (
    Cnn,
    Gpt,
    Imported,
    Lora,
    Mlp,
    Model,
    Pretrained,
    ResNet,
    Unet,
)
from dray.spec.program.recipes import RECIPES, RecipeName
from dray.spec.program.script import Script
from dray.spec.resources import Elastic, Resources, RoleResources
from dray.spec.sweep import Parameter, SuccessiveHalving, Sweep
from dray.spec.training.data import Data, Format, Missing
from dray.spec.training.method import AnyMethod, Dpo, Reward, Sft
from dray.spec.training.parallel import MAX_WORKERS, Parallel
from dray.spec.training.sync import (
    AllReduce,
    AutoSync,
    Compression,
    Correction,
    Gossip,
    Outer,
    ParameterServer,
    Sync,
)
from dray.spec.training.text_samples import PromptMessage, TextSamples
from dray.spec.training.train import (
    EarlyStopping,
    Ema,
    LrScaling,
    OnDivergence,
    Optimizer,
    Profile,
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
    "AnyMethod",
    "Array",
    "AutoSync",
    "Checkpoint",
    "Cnn",
    "Compression",
    "Correction",
    "Data",
    "Document",
    "Dpo",
    "EarlyStopping",
    "Elastic",
    "Ema",
    "Environment",
    "Federated",
    "Format",
    "Gossip",
    "Gpt",
    "Imported",
    "InMemory",
    "InitFrom",
    "JobSpec",
    "Lora",
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
    "Pretrained",
    "Profile",
    "PromptMessage",
    "RecipeName",
    "ResNet",
    "Resources",
    "Reward",
    "RoleResources",
    "Schedule",
    "Script",
    "Sft",
    "SuccessiveHalving",
    "Sweep",
    "Sync",
    "TextSamples",
    "Train",
    "Unet",
]
