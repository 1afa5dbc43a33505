"""The models that recipes can train."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from dray.spec.fields import CodeId, Document, Int, Number
from dray.spec.training.data import SourceUrl

Dropout = Annotated[Number, Field(ge=0.0, lt=1.0)]
ContextLength = Annotated[Int, Field(ge=2, le=2**20)]
CONTEXT_LENGTH: Final = 128
"""Default number of tokens in a sample."""


class Cnn(Document):
    """Three 3x3 convolutions and a linear layer, for small images."""

    name: Literal["cnn"] = "cnn"
    """Chooses this model."""
    width: Annotated[Int, Field(ge=1, le=4096)] = 32
    """Channels of the first convolution."""
    dropout: Dropout = 0.0
    """Share of activations that training leaves out at random."""


class ResNet(Document):
    """The residual network for small images of He et al. 2015 (arXiv:1512.03385), section 4.2."""

    name: Literal["resnet"] = "resnet"
    """Chooses this model."""
    depth: Literal[8, 14, 20, 32, 44, 56] = 20
    """Layers: 6 n + 2, for n blocks in each of the three stages."""
    width: Annotated[Int, Field(ge=1, le=1024)] = 16
    """Channels of the first stage; each stage doubles them."""

    @property
    def num_blocks(self) -> int:
        return (self.depth - 2) // 2


class Mlp(Document):
    """A perceptron of equal hidden layers, for small images and for tables."""

    name: Literal["mlp"] = "mlp"
    """Chooses this model."""
    width: Annotated[Int, Field(ge=1, le=16384)] = 32
    """Units of a hidden layer."""
    num_layers: Annotated[Int, Field(ge=1, le=64)] = 2
    """Layers, one after the other."""
    dropout: Dropout = 0.0
    """Share of activations that training leaves out at random."""
    embedding_dim: Annotated[Int, Field(ge=1, le=1024)] | None = None
    """Size of the vector learned for each category of a table; by default it grows with the
    number of categories, up to 50."""


class Gpt(Document):
    """A decoder-only transformer that predicts the next token."""

    name: Literal["gpt"] = "gpt"
    """Chooses this model."""
    num_layers: Annotated[Int, Field(ge=1, le=256)] = 4
    """Layers, one after the other."""
    num_heads: Annotated[Int, Field(ge=1, le=256)] = 4
    """Heads of each attention."""
    width: Annotated[Int, Field(ge=1, le=65536)] = 128
    """Size of a token's vector; a multiple of twice `num_heads`."""
    context_length: ContextLength = CONTEXT_LENGTH
    """Tokens of a sample, which is also the context of a prediction."""
    dropout: Dropout = 0.0
    """Share of activations that training leaves out at random."""
    tokenizer: SourceUrl | None = None
    """A `tokenizer.json` of the Hugging Face tokenizers library; without one a token is a byte."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width {self.width} is not a multiple of twice num_heads {self.num_heads}"
            )
        return self


class Unet(Document):
    """The U-Net of Ronneberger et al. 2015 (arXiv:1505.04597), for masks as large as the images."""

    name: Literal["unet"] = "unet"
    """Chooses this model."""
    width: Annotated[Int, Field(ge=1, le=1024)] = 32
    """Channels of the first level; each level below doubles them."""
    depth: Annotated[Int, Field(ge=1, le=8)] = 4
    """Number of times the image is halved; its sides need at least 2**(depth + 1) pixels."""
    dropout: Dropout = 0.0
    """Share of activations that training leaves out at random, on the lowest level."""

    @property
    def least_side(self) -> int:
        """Least height and width of an image in pixels, so that the lowest level has more than one
        pixel: a single pixel can't be normalised."""
        return int(2 ** (self.depth + 1))


def _module_and_name(value: str) -> str:
    module, colon, name = value.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ValueError("must be MODULE:NAME, such as my_package.net:Net")
    return value


ImportPath = Annotated[str, StringConstraints(max_length=1024), AfterValidator(_module_and_name)]


class Imported(Document):
    """A model of the user's own: a class, or a function, that returns a `torch.nn.Module`."""

    name: Literal["imported"] = "imported"
    """Chooses this model; the field `import` alone also does."""
    target: ImportPath = Field(alias="import")
    """Module and name, such as `my_package.net:Net`."""
    args: Annotated[dict[str, JsonValue], Field(max_length=256)] = {}
    """Keyword arguments of the call that makes the model."""
    code: CodeId | None = None
    """Id of the uploaded code with the module, as returned by `dray submit --code` and `POST
    /v1/code`. Unset, the module must be installed on the nodes."""
    context_length: ContextLength | None = None
    """Tokens of a sample of `language_model`; unset, 128."""
    tokenizer: SourceUrl | None = None
    """The tokenizer of `language_model`, as for `gpt`."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.target.partition(":")[2]

    @model_serializer(mode="wrap")
    def _as_written(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write `target` as `import`, its name in documents, which is a keyword of Python."""
        return {
            "import" if name == "target" else name: value for name, value in serialise(self).items()
        }


Model = Annotated[Cnn | ResNet | Mlp | Gpt | Unet | Imported, Field(discriminator="name")]
