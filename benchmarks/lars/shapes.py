"""Parameter shapes of networks on which optimizers are measured."""

from __future__ import annotations

Shape = tuple[int, ...]

# Ginsburg's alexnet_bn (borisgin/nvcaffe) with Jia et al.'s norm after the last pooling: weight
# and bias of each convolution and linear layer, gain and bias of the norms.
_CONVOLUTIONS = [(96, 3, 11, 11), (256, 48, 5, 5), (384, 256, 3, 3), (384, 192, 3, 3)]
_CONVOLUTIONS += [(256, 192, 3, 3)]
_LINEAR = [(4096, 9216), (4096, 4096), (1000, 4096)]
_NORMS = [96, 256, 384, 384, 256]
ALEXNET_BN: list[Shape] = [s for weight in _CONVOLUTIONS + _LINEAR for s in (weight, (weight[0],))]
ALEXNET_BN += [(channels,) for channels in _NORMS for _ in range(2)]


def _resnet_50() -> list[Shape]:
    """Return the shapes in the order of timm and torchvision (He et al. 2015, table 1)."""

    def conv(outputs: int, inputs: int, kernel: int) -> list[Shape]:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]  # with its norm

    shapes, inputs = conv(64, 3, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += conv(width, inputs, 1) + conv(width, width, 3) + conv(4 * width, width, 1)
            shapes += conv(4 * width, inputs, 1) if block == 0 else []
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


RESNET_50: list[Shape] = _resnet_50()


def _vit_b_16() -> list[Shape]:
    """Return the shapes in timm's order (Dosovitskiy et al. 2020, table 1, 224 x 224 pixels)."""

    def linear(outputs: int, inputs: int) -> list[Shape]:
        return [(outputs, inputs), (outputs,)]

    width, norm = 768, [(768,), (768,)]
    shapes: list[Shape] = [(1, 1, width), (1, 197, width), (width, 3, 16, 16), (width,)]
    for _ in range(12):
        shapes += [*norm, *linear(3 * width, width), *linear(width, width)]
        shapes += [*norm, *linear(4 * width, width), *linear(width, 4 * width)]
    return [*shapes, *norm, *linear(1000, width)]


VIT_B_16: list[Shape] = _vit_b_16()
TINY: list[Shape] = [(16, 16)] * 1000
