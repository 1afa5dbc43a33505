"""Traces of the networks for images and tables (`ray_workers.recipes.models`)."""

from __future__ import annotations

from math import prod

from dray.spec import Cnn, JobSpec, Mlp, ResNet, Unet
from service.planning.model.op_trace import OpTrace
from service.planning.model.shapes import Shapes

FP32 = 4
INDEX = 8


def record(
    spec: JobSpec,
    shapes: Shapes,
    samples: int,
    *,
    half: bool,
    on_gpu: bool,
    stage: tuple[int, int] = (0, 1),
) -> OpTrace:
    """Record the trace of a model. `half` is set if autocast uses a 16-bit type. `stage` is (index,
    number of stages) in a pipeline."""
    network = _Network(samples, half=half, on_gpu=on_gpu)
    match spec.model:
        case Cnn():
            network.cnn(spec.model, shapes)
        case ResNet():
            network.resnet(spec.model, shapes, *stage)
        case Unet():
            network.unet(spec.model, shapes)
        case Mlp():
            network.mlp(spec.model, shapes)
        case _:
            raise ValueError(f"no network: {spec.model}")
    return network.trace


class _Network:
    """Records a network layer by layer. A value is the index of its tensor in the trace."""

    def __init__(self, samples: int, *, half: bool, on_gpu: bool) -> None:
        self.trace = OpTrace(cast_bytes=2 if half else 0)
        self.samples = samples
        self.low = 2 if half else FP32
        self.norm = FP32 if on_gpu or not half else 2
        """Bytes per element of the output of a norm. On a GPU, autocast computes norms in fp32."""
        self.on_gpu = on_gpu
        self._width: dict[int, int] = {}
        """Bytes per element, keyed by tensor. Tensors that are not listed have 4 bytes per
        element."""

    def cnn(self, model: Cnn, shapes: Shapes) -> None:
        channels, height, width = shapes.image or (1, 1, 1)
        self.trace.begin(is_block=False)
        value = self._images(channels, height, width)
        value = self._convolved(value, channels, model.width, height, width)
        value = self._convolved(value, model.width, 2 * model.width, height, width)
        height, width = height // 2, width // 2
        value = self._pooled(value, 2 * model.width, height, width)
        value = self._convolved(value, 2 * model.width, 2 * model.width, height, width)
        height, width = height // 2, width // 2
        value = self._pooled(value, 2 * model.width, height, width)
        count = 2 * model.width * height * width
        value = self._dropped(value, count, model.dropout)
        self._scored(self._linear(value, count, shapes.outputs), shapes.outputs)

    def resnet(self, model: ResNet, shapes: Shapes, stage: int, num_stages: int) -> None:
        channels, height, width = shapes.image or (1, 1, 1)
        first, stop = (model.num_blocks * n // num_stages for n in (stage, stage + 1))
        inputs, value = model.width, 0
        if stage == 0:
            self.trace.begin(is_block=False)
            value = self._images(channels, height, width)
            value = self._convolved(value, channels, model.width, height, width)
        for number in range(stop):
            level, of_level = divmod(number, model.num_blocks // 3)
            outputs = model.width * 2**level
            before = self.samples * inputs * height * width * self.norm
            if level > 0 and of_level == 0:
                height, width = -(-height // 2), -(-width // 2)
            if number == first and stage > 0:  # already counted as received
                value = self.trace.given(0.0, wants_gradient=True, gradient=before)
                self._width[value] = self.norm
            if number >= first:
                value = self._residual(value, inputs, outputs, height, width)
            inputs = outputs
        if stage < num_stages - 1:
            size = self.samples * inputs * height * width * self.norm
            self.trace.add([value], 0.0, saves=[value], gradient=size, passes_on=True)
            return
        self.trace.begin(is_block=False)
        value = self.trace.add([value], self.samples * inputs * FP32)
        self._scored(self._linear(value, inputs, shapes.outputs), shapes.outputs)

    def _residual(self, value: int, inputs: int, outputs: int, height: int, width: int) -> int:
        self.trace.begin(is_block=True)
        changed = self._convolved(value, inputs, outputs, height, width)
        changed = self._convolution(changed, outputs, outputs, height, width)
        changed = self._normed(changed, outputs, height, width)
        shortcut = value
        if inputs != outputs:
            shortcut = self._convolution(value, inputs, outputs, height, width, kernel=1)
        size = self.samples * outputs * height * width * self.norm
        value = self.trace.add([shortcut, changed], size, passes_on=True)
        return self._active(value, outputs, height, width)

    def unet(self, model: Unet, shapes: Shapes) -> None:
        channels, height, width = shapes.image or (1, 1, 1)
        step = 2**model.depth
        height, width = height + -height % step, width + -width % step
        self.trace.begin(is_block=False)
        value = self._images(channels, height, width)
        inputs, levels = channels, []
        for depth in range(model.depth + 1):
            outputs = model.width * 2**depth
            if depth:
                height, width = height // 2, width // 2
                self.trace.begin(is_block=False)
                value = self._pooled(value, inputs, height, width)
            self.trace.begin(is_block=True)
            value = self._convolved(value, inputs, outputs, height, width)
            value = self._convolved(value, outputs, outputs, height, width)
            levels.append(value)
            inputs = outputs
        value = self._dropped(levels.pop(), inputs * height * width, model.dropout)
        for _ in range(model.depth):
            outputs = inputs // 2
            height, width = 2 * height, 2 * width
            self.trace.begin(is_block=True)
            grown = self._convolution(
                value, inputs, outputs, height, width, kernel=2, has_bias=True
            )
            size = self.samples * 2 * outputs * height * width * self.norm
            joined = self.trace.add([levels.pop(), grown], size)
            value = self._convolved(joined, 2 * outputs, outputs, height, width)
            value = self._convolved(value, outputs, outputs, height, width)
            inputs = outputs
        self.trace.begin(is_block=False)
        scores = self._convolution(
            value, inputs, shapes.outputs, height, width, kernel=1, has_bias=True
        )
        size = self.samples * shapes.outputs * height * width * FP32
        if self.low < FP32:
            scores = self.trace.add([scores], size)
        # Cross entropy and Dice loss, both computed from the scores.
        entropy = self.trace.add([scores], size, saves_output=True)
        targets = self.trace.given(self.samples * height * width * INDEX)
        entropy = self.trace.add([entropy], FP32, saves=[entropy, targets])
        chances = self.trace.add([scores], size, saves_output=True, own_bytes=size)
        overlap = self.trace.add([chances], FP32, temporary_bytes=size)
        self.trace.add([entropy, overlap], FP32)

    def mlp(self, model: Mlp, shapes: Shapes) -> None:
        count = shapes.columns or prod(shapes.image or (1,))
        self.trace.begin(is_block=False)
        value = self._images(count, 1, 1)
        for _ in range(model.num_layers):
            value = self._linear(value, count, model.width)
            count = model.width
            value = self._active(value, count, 1, 1, self.low)
            value = self._dropped(value, count, model.dropout)
        self._scored(self._linear(value, count, shapes.outputs), shapes.outputs)

    def _images(self, channels: int, height: int, width: int) -> int:
        return self.trace.given(self.samples * channels * height * width * FP32)

    def _convolved(self, value: int, inputs: int, outputs: int, height: int, width: int) -> int:
        """Add a convolution, a norm and a ReLU, like `convolution` in
        `ray_workers.recipes.models`."""
        value = self._convolution(value, inputs, outputs, height, width)
        return self._active(self._normed(value, outputs, height, width), outputs, height, width)

    def _convolution(
        self,
        value: int,
        inputs: int,
        outputs: int,
        height: int,
        width: int,
        *,
        kernel: int = 3,
        has_bias: bool = False,
    ) -> int:
        value = self._low(value)
        elements = inputs * outputs * kernel**2 + (outputs if has_bias else 0)
        positions = self.samples * height * width
        value = self.trace.add(
            [value],
            positions * outputs * self.low,
            saves=[value],
            parameters=elements,
            cast=elements,
            is_costly=True,
            # A convolution that doubles the height and width reads one input pixel per output
            # pixel.
            flops=2 * positions * inputs * outputs * (1 if kernel == 2 else kernel**2),
        )
        self._width[value] = self.low
        return value

    def _normed(self, value: int, channels: int, height: int, width: int) -> int:
        size = self.samples * channels * height * width * self.norm
        if self.norm != self.low:
            value = self.trace.add([value], size)
        groups = next(count for count in range(8, 0, -1) if channels % count == 0)
        value = self.trace.add(
            [value],
            size,
            saves=[value],
            parameters=2 * channels,
            own_bytes=2 * self.samples * groups * FP32,
        )
        self._width[value] = self.norm
        return value

    def _active(
        self, value: int, channels: int, height: int, width: int, low: int | None = None
    ) -> int:
        low = low or self.norm
        size = self.samples * channels * height * width * low
        value = self.trace.add([value], size, saves_output=True)
        self._width[value] = low
        return value

    def _pooled(self, value: int, channels: int, height: int, width: int) -> int:
        """Add a pooling layer. `height` and `width` are the size of the output."""
        count = self.samples * channels * height * width
        value = self.trace.add([value], count * self.norm, saves=[value], own_bytes=count * INDEX)
        self._width[value] = self.norm
        return value

    def _linear(self, value: int, inputs: int, outputs: int) -> int:
        value = self._low(value)
        elements = (inputs + 1) * outputs
        value = self.trace.add(
            [value],
            self.samples * outputs * self.low,
            saves=[value],
            parameters=elements,
            cast=elements,
            is_costly=True,
            flops=2 * self.samples * inputs * outputs,
        )
        self._width[value] = self.low
        return value

    def _low(self, value: int) -> int:
        """Return the tensor that autocast passes to a matmul or convolution instead of `value`."""
        size = self.trace.bytes[value]
        is_low = self._width.get(value, FP32) == self.low
        return value if is_low else self.trace.add([value], size / 2)

    def _dropped(self, value: int, count: int, chance: float) -> int:
        if chance == 0.0:
            return value
        size = self.trace.bytes[value]
        numbers = self.samples * count
        return self.trace.add([value], size, own_bytes=numbers if self.on_gpu else size)

    def _scored(self, scores: int, outputs: int) -> None:
        size = self.samples * outputs * FP32
        chances = self.trace.add([scores], size, saves_output=True)
        targets = self.trace.given(self.samples * INDEX)
        self.trace.add([chances], FP32, saves=[chances, targets])
