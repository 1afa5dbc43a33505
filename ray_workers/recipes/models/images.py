"""Networks for small images: (N, channels, height, width) in 0..1 -> (N, num_classes) logits.

The networks use GroupNorm (Wu & He 2018, arXiv:1803.08494) instead of BatchNorm: a sample's result
must not depend on the other samples in its batch, because the world size would then affect the
results.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dray import spec
from ray_workers.training.core.errors import DataError
from ray_workers.training.data.sampler import share

GROUPS = 8
Options = spec.Cnn | spec.ResNet | spec.Mlp | spec.Imported
"""The models that can classify images."""
Shape = tuple[int, int, int]
"""(channels, height, width)"""


def build(options: spec.Cnn | spec.ResNet | spec.Mlp, shape: Shape, num_classes: int) -> nn.Module:
    """Build a network. Raises DataError if the images are too small for the network."""
    match options:
        case spec.Cnn():
            return Cnn(options, shape, num_classes)
        case spec.ResNet():
            return ResNet(options, shape, num_classes)
        case spec.Mlp():
            return Mlp(options, shape, num_classes)


class Cnn(nn.Module):
    """Three 3x3 convolutions, with 2x2 pooling after the last two, and a linear layer."""

    def __init__(self, options: spec.Cnn, shape: Shape, num_classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < 4:
            raise DataError(
                f"images of {height} x {width} pixels are too small for a cnn, which requires at "
                "least 4 x 4"
            )
        self.body = nn.Sequential(
            *convolution(channels, options.width),
            *convolution(options.width, 2 * options.width),
            nn.MaxPool2d(2),
            *convolution(2 * options.width, 2 * options.width),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(options.dropout),
        )
        self.head = nn.Linear(2 * options.width * (height // 4) * (width // 4), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(images)))


class ResNet(nn.Module):
    """Three stages of residual blocks with 1, 2 and 4 times the width, then the mean over
    pixels."""

    def __init__(self, options: spec.ResNet, shape: Shape, num_classes: int) -> None:
        super().__init__()
        inputs = options.width
        self.stem: nn.Module | None = nn.Sequential(*convolution(shape[0], inputs))
        stages: list[nn.Module] = []
        for stage in range(3):
            outputs = options.width * 2**stage
            for block in range(options.num_blocks // 3):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(Residual(inputs, outputs, stride))
                inputs = outputs
        self.num_blocks = options.num_blocks
        self.body = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head: nn.Module | None = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits from images. In a pipeline stage, the input or the output can be
        intermediate activations."""
        hidden = images if self.stem is None else self.stem(images)
        hidden = self.body(hidden)
        return cast(Tensor, hidden if self.head is None else self.head(hidden))

    def keep_stage(self, stage: int, num_stages: int) -> None:
        """Remove the layers of other stages. The first stage keeps the stem, and the last stage
        keeps the head."""
        start, stop = share(self.num_blocks, stage, num_stages)
        stop = len(self.body) if stage == num_stages - 1 else stop
        for number in range(len(self.body)):
            if not start <= number < stop:
                delattr(self.body, str(number))  # the names of the other blocks don't change
        if stage > 0:
            self.stem = None
        if stage < num_stages - 1:
            self.head = None


class Residual(nn.Module):
    """Computes x + f(x), followed by ReLU. f is two 3x3 convolutions. If the sizes differ, a 1x1
    convolution is applied to x."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        second, norm, _ = convolution(outputs, outputs)
        silent = Silent(cast(nn.GroupNorm, norm).num_groups, outputs)
        self.change = nn.Sequential(*convolution(inputs, outputs, stride), second, silent)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.shortcut(images) + self.change(images))


class Silent(nn.GroupNorm):
    """GroupNorm with initial weights of zero, so that a residual block is initially the
    identity."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.weight)


class Mlp(nn.Module):
    """Hidden layers that are applied to the flattened image."""

    def __init__(self, options: spec.Mlp, shape: Shape, num_classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.body = nn.Sequential(nn.Flatten(), *hidden_layers(options, channels * height * width))
        self.head = nn.Linear(options.width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(images)))


def hidden_layers(options: spec.Mlp, num_inputs: int) -> list[nn.Module]:
    """Return `num_layers` hidden layers, each a linear layer followed by ReLU and dropout."""
    layers: list[nn.Module] = []
    for number in range(options.num_layers):
        inputs = num_inputs if number == 0 else options.width
        layers += [nn.Linear(inputs, options.width), nn.ReLU(), nn.Dropout(options.dropout)]
    return layers


def convolution(
    inputs: int, outputs: int, stride: int = 1
) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return a 3x3 convolution with its norm and ReLU. A stride of 1 preserves the size."""
    groups = next(count for count in range(GROUPS, 0, -1) if outputs % count == 0)
    return (
        nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(groups, outputs),
        nn.ReLU(),
    )
