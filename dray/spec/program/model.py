"""The models that recipes can train."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StrictBool,
    StringConstraints,
    model_serializer,
    model_validator,
)

from dray.spec.fields import (
    CodeId,
    Document,
    Int,
    ModelVersion,
    Number,
    PlainText,
    Sha256,
    a_number,
)
from dray.spec.training.data import OF_A_URL, CredentialsName, SourceUrl, base_url

Dropout = Annotated[Number, Field(ge=0.0, lt=1.0)]
ContextLength = Annotated[Int, Field(ge=2, le=2**20)]
MAX_LICENCES = 16
CONTEXT_LENGTH: Final = 128
"""Default number of tokens in a sample."""


class Cnn(Document):
    """Three 3x3 convolutions followed by a linear layer, for small images."""

    name: Literal["cnn"] = "cnn"
    """Selects this model."""
    width: Annotated[Int, Field(ge=1, le=4096)] = 32
    """Number of channels of the first convolution."""
    dropout: Dropout = 0.0
    """Fraction of activations that are randomly set to zero in training."""


class ResNet(Document):
    """The residual network for small images from He et al. 2015 (arXiv:1512.03385), section 4.2."""

    name: Literal["resnet"] = "resnet"
    """Selects this model."""
    depth: Annotated[Literal[8, 14, 20, 32, 44, 56], BeforeValidator(a_number)] = 20
    """Number of layers: 6 n + 2, with n blocks in each of the three stages."""
    width: Annotated[Int, Field(ge=1, le=1024)] = 16
    """Number of channels in the first stage. Each further stage has twice as many channels."""

    @property
    def num_blocks(self) -> int:
        return (self.depth - 2) // 2


class Mlp(Document):
    """A perceptron with hidden layers of equal width, for small images and tables."""

    name: Literal["mlp"] = "mlp"
    """Selects this model."""
    width: Annotated[Int, Field(ge=1, le=16384)] = 32
    """Number of units per hidden layer."""
    num_layers: Annotated[Int, Field(ge=1, le=64)] = 2
    """Number of layers."""
    dropout: Dropout = 0.0
    """Fraction of activations that are randomly set to zero in training."""
    embedding_dim: Annotated[Int, Field(ge=1, le=1024)] | None = None
    """Size of the embedding vector of each category in a table. The default grows with the number
    of categories, up to 50."""


class Gpt(Document):
    """A decoder-only transformer that predicts the next token."""

    name: Literal["gpt"] = "gpt"
    """Selects this model."""
    num_layers: Annotated[Int, Field(ge=1, le=256)] = 4
    """Number of layers."""
    num_heads: Annotated[Int, Field(ge=1, le=256)] = 4
    """Number of attention heads per layer."""
    width: Annotated[Int, Field(ge=1, le=65536)] = 128
    """Size of a token's embedding vector; must be a multiple of twice `num_heads`."""
    context_length: ContextLength = CONTEXT_LENGTH
    """Number of tokens per sample, which is also the context length for predictions."""
    dropout: Dropout = 0.0
    """Fraction of activations that are randomly set to zero in training."""
    tokenizer: SourceUrl | None = None
    """URL of a `tokenizer.json` of the Hugging Face tokenizers library; if unset, each byte is a
    token."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width is {self.width}, but must be a multiple of 2 x num_heads (num_heads is "
                f"{self.num_heads})"
            )
        return self


class Unet(Document):
    """The U-Net of Ronneberger et al. 2015 (arXiv:1505.04597), for masks of the same size as the
    images."""

    name: Literal["unet"] = "unet"
    """Selects this model."""
    width: Annotated[Int, Field(ge=1, le=1024)] = 32
    """Number of channels on the first level. Each lower level has twice as many channels."""
    depth: Annotated[Int, Field(ge=1, le=8)] = 4
    """Number of times the image size is halved. The sides of an image must have at least 2**(depth
    + 1) pixels."""
    dropout: Dropout = 0.0
    """Fraction of activations on the lowest level that are randomly set to zero in training."""

    @property
    def least_side(self) -> int:
        """Minimum height and width of an image in pixels. The lowest level must have more than one
        pixel, because a single pixel can't be normalised."""
        return int(2 ** (self.depth + 1))


def _module_and_name(value: str) -> str:
    module, colon, name = value.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ValueError("must be MODULE:NAME, such as my_package.net:Net")
    return value


ImportPath = Annotated[str, StringConstraints(max_length=1024), AfterValidator(_module_and_name)]


class Imported(Document):
    """The user's own model: a `torch.nn.Module` class, or a function that returns a module."""

    name: Literal["imported"] = "imported"
    """Selects this model. Can be omitted if `import` is set."""
    target: ImportPath = Field(alias="import")
    """Module and name, such as `my_package.net:Net`."""
    args: Annotated[dict[str, JsonValue], Field(max_length=256)] = {}
    """Keyword arguments for the class or function."""
    code: CodeId | None = None
    """Id of the uploaded code that contains the module, as returned by `POST /v1/code`; `dray
    submit --code` fills it in. If unset, the module must be installed on the nodes."""
    context_length: ContextLength | None = None
    """Number of tokens per sample, for `language_model`; 128 if unset."""
    tokenizer: SourceUrl | None = None
    """The tokenizer for `language_model`, as for `gpt`."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.target.partition(":")[2]

    @model_serializer(mode="wrap")
    def _as_written(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write `target` under the name that it has in documents, `import`. A Python field can't
        have this name, because it is a keyword."""
        return {
            "import" if name == "target" else name: value for name, value in serialise(self).items()
        }


ModuleName = Annotated[PlainText, StringConstraints(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")]


class Lora(Document):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): the base's weights stay frozen, and the
    product of two small matrices is added to each target. The names are the same as in peft."""

    kind: Literal["lora", "dora"] = "lora"
    """dora: the length of each row of the sum is trained too (Liu et al. 2024, arXiv:2402.09353;
    `use_dora` in peft)."""
    rank: Annotated[Int, Field(ge=1, le=4096)] = 16
    """Number of columns of the first matrix and of rows of the second (`r` in peft)."""
    alpha: Annotated[Number, Field(gt=0.0, le=65536.0)] = 32.0
    """The product is multiplied by `alpha / rank` (`lora_alpha` in peft)."""
    dropout: Dropout = 0.0
    """Fraction of an adapter's inputs that are randomly set to zero in training."""
    target_modules: (
        Literal["all-linear"] | Annotated[list[ModuleName], Field(min_length=1, max_length=256)]
    ) = "all-linear"
    """Linear layers that get an adapter: the last parts of their names, such as `[q_proj, v_proj]`,
    or all linear layers except the output layer."""
    rslora: StrictBool = False
    """Whether to multiply by `alpha / sqrt(rank)` instead (Kalajdzievski 2023,
    arXiv:2312.03732)."""
    base_precision: Literal["fp32", "bf16", "nf4"] = "fp32"
    """Data type in which the ranks hold the frozen base. bf16 halves the memory for it. nf4 also
    quantizes its linear layers, except for the output layer, to 4 bits per weight (QLoRA,
    arXiv:2305.14314), which requires the package bitsandbytes on the nodes. Both require
    `train.precision: bf16`. The adapter is held in fp32."""
    merge: StrictBool = True
    """Whether the result also contains the merged model, in addition to the adapter."""


def _adapter(given: Any) -> Any:
    """Expand the short forms `lora`, `dora` and `none`."""
    if given == "none":
        return None
    return {"kind": given} if isinstance(given, str) else given


_MODEL_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
ModelName = Annotated[str, StringConstraints(pattern=_MODEL_NAME, max_length=128)]
"""A name in the catalogue. It has neither a colon nor a slash, so that it can't be an address."""


def _name_or_folder(base: str) -> str:
    if re.match(_MODEL_NAME, base):
        return base
    if ":" not in base:
        raise ValueError(
            "is neither a name, which has only letters, digits and ._-, nor a URL: write a path as "
            "file:///path"
        )
    return base_url(base)


BaseAddress = Annotated[
    PlainText,
    StringConstraints(min_length=1, max_length=2048),
    AfterValidator(_name_or_folder),
    Field(json_schema_extra={"pattern": OF_A_URL}),
]


class Pretrained(Document):
    """A causal language model in the format of Hugging Face's transformers, to be fine-tuned."""

    name: Literal["pretrained"] = "pretrained"
    """Selects this model."""
    base: BaseAddress
    """Name of a model in the server's catalogue (`dray model bases` lists them), which has no
    colon; or the URL of a folder with `config.json`, weights as safetensors, and a tokenizer:
    `file:///path`, which must be readable on every node, `s3://bucket/prefix`, `https://host/path`,
    `hf://org/name@COMMIT` for a model on Hugging Face's hub, `job://ID` for the result of
    another job that has succeeded, or `model://NAME@VERSION` (or `@ALIAS`) for a registered model,
    which the server replaces with the address of the job's result."""
    registered: ModelVersion | None = None
    """The version of a registered model that `base` named. The server sets this field."""
    catalogue: ModelName | None = None
    """Name of the base in the server's catalogue. The server sets this field, and replaces a name
    in `base` with the model's address."""
    accept_licence: (
        StrictBool
        | PlainText
        | Annotated[list[PlainText], Field(min_length=1, max_length=MAX_LICENCES)]
    ) = False
    """Whether the submitter accepts the licences of models in the catalogue: `true`, the name of
    the licence, or the names of several licences. The acceptance is recorded in the job's
    events."""
    sha256: Sha256 | None = None
    """Expected hash of the base's files, as in `base_sha256` of a result's `dray.json`. For a model
    in the catalogue, the server sets this field and the next one."""
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = None
    """Chat template in Jinja, which replaces the template of the base's tokenizer."""
    credentials: CredentialsName | None = None
    """Name of a credentials file for the base, as in `data.credentials`."""
    code: CodeId | None = None
    """Id of the uploaded code with the classes of `method.metrics`, as returned by `POST /v1/code`;
    `dray submit --code` fills it in. If unset, the modules must be installed on the nodes."""
    adapter: Annotated[
        Lora | None,
        BeforeValidator(
            _adapter, json_schema_input_type=Lora | Literal["lora", "dora", "none"] | None
        ),
    ] = None
    """Adapter to train on top of the frozen base. If unset, or `none`, all weights are trained.
    `lora` and `dora` are short forms for an adapter with the defaults."""

    @property
    def licences(self) -> list[str]:
        """The licences that are accepted by their names."""
        given = self.accept_licence
        if isinstance(given, bool):
            return []
        return [given] if isinstance(given, str) else given

    @property
    def is_named(self) -> bool:
        """Whether `base` is the name of a model in the catalogue."""
        return ":" not in self.base


Model = Annotated[
    Cnn | ResNet | Mlp | Gpt | Unet | Imported | Pretrained, Field(discriminator="name")
]
