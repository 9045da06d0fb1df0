"""AlexNet with batch norm, as in the LARS paper, and with the change of Jia et al. 2018.

Sources: models/alexnet_bn of borisgin/nvcaffe, the Caffe of the LARS authors.
``train_val2.prototxt`` has batch norm in front of the next convolution (order ``relu-norm``),
``train_val.prototxt`` between convolution and ReLU (order ``norm-relu``). Jia et al., arXiv
1807.11205, add a batch norm after the last pooling layer; without it they did not reach the
accuracy of a small batch at 64k.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from ..errors import RecipeError

ORDERS = ("relu-norm", "norm-relu")
INITS = ("gaussian", "fan-in")

#: Output channels, kernel, stride, padding, whether it is grouped, whether pooling follows.
_CONVOLUTIONS = (
    (96, 11, 4, 0, False, True),
    (256, 5, 1, 2, True, True),
    (384, 3, 1, 1, False, False),
    (384, 3, 1, 1, True, False),
    (256, 3, 1, 1, True, True),
)
_HIDDEN = 4096  # outputs of fc6 and fc7
_EPS, _MOMENTUM = 1e-4, 0.1  # Caffe's moving_average_fraction 0.9 is the weight of the old value


class AlexNetBN(nn.Module):
    """AlexNet-BN: ``[N, 3, img_size, img_size]`` to logits ``[N, num_classes]``.

    Layers have the names of the prototxt. Weights are initialized as published there, from a normal
    distribution with standard deviation 0.01 in convolutions and fc8, 0.005 in fc6 and fc7. Biases
    start, as there, at 0.1 in fc6 and fc7, and elsewhere at 0.01 (``relu-norm``) or at 0.1 in conv5
    and 0 in fc8 (``norm-relu``). If the trust ratio applies to biases too, a bias of 0 takes the
    full learning rate.

    Args:
        num_classes: Number of outputs.
        order: ``relu-norm``: convolution, ReLU, pooling, norm, without the norm after conv5.
            ``norm-relu``: convolution, norm, ReLU, pooling; only conv5 has a bias.
        bn_after_pool5: Whether there is a batch norm between pool5 and fc6 (Jia et al. 2018).
        groups: Groups of conv2, conv4 and conv5. 2 is published and has 60,965,224 weights and
            biases; 1 has 62,378,344 (``relu-norm``, 1,000 classes).
        norm_affine: Whether batch norms have a gain and a bias. In nvcaffe only those of
            ``norm-relu`` do.
        init: Initialization of the convolutions: ``gaussian``, as above, or ``fan-in``, with
            standard deviation ``sqrt(2 / inputs)`` (He et al. 2015).
        dropout: Probability of dropout after fc6 and fc7.
        img_size: Height and width of images in pixels, at least 67. 227 gives maps of 55, 27, 13
            and 6 pixels.

    Raises:
        ValueError: An argument has another value.
        RecipeError: In the forward pass, the images have another size.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        order: str = "relu-norm",
        bn_after_pool5: bool = False,
        groups: int = 2,
        norm_affine: bool = True,
        init: str = "gaussian",
        dropout: float = 0.5,
        img_size: int = 227,
    ) -> None:
        super().__init__()
        for key, value, valid in (("order", order, ORDERS), ("init", init, INITS)):
            if value not in valid:
                raise ValueError(f"{key} must be one of {', '.join(valid)}, not {value!r}")
        if groups not in (1, 2):
            raise ValueError(f"groups must be 1 or 2, not {groups}")
        if img_size < 67:
            raise ValueError(f"img_size must be at least 67, not {img_size}")
        self.num_classes = num_classes
        self.img_size = img_size

        def norm(channels: int) -> nn.Module:
            return nn.BatchNorm2d(channels, eps=_EPS, momentum=_MOMENTUM, affine=norm_affine)

        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels, side, last = 3, img_size, len(_CONVOLUTIONS)
        for i, (out, kernel, stride, padding, grouped, pooled) in enumerate(_CONVOLUTIONS, 1):
            layers[f"conv{i}"] = nn.Conv2d(
                channels,
                out,
                kernel,
                stride,
                padding,
                groups=groups if grouped else 1,
                bias=order == "relu-norm" or i == last,
            )
            side = (side + 2 * padding - kernel) // stride + 1
            if order == "norm-relu":
                layers[f"bn{i}"] = norm(out)
            layers[f"relu{i}"] = nn.ReLU(inplace=True)
            if pooled:
                layers[f"pool{i}"] = nn.MaxPool2d(3, 2)
                side = (side - 3) // 2 + 1
            if order == "relu-norm" and i < last:
                layers[f"bn{i + 1}"] = norm(out)
            channels = out
        if bn_after_pool5:
            layers["bn_pool5"] = norm(channels)
        self.features = nn.Sequential(layers)
        self.classifier = nn.Sequential(
            OrderedDict(
                fc6=nn.Linear(channels * side * side, _HIDDEN),
                relu6=nn.ReLU(inplace=True),
                drop6=nn.Dropout(dropout),
                fc7=nn.Linear(_HIDDEN, _HIDDEN),
                relu7=nn.ReLU(inplace=True),
                drop7=nn.Dropout(dropout),
                fc8=nn.Linear(_HIDDEN, num_classes),
            )
        )
        self._initialise(order, init)

    def _initialise(self, order: str, init: str) -> None:
        front = order == "relu-norm"
        biases = {"conv": 0.01 if front else 0.1, "fc6": 0.1, "fc7": 0.1}
        biases["fc8"] = 0.01 if front else 0.0
        for path, module in self.named_modules():
            name = path.rpartition(".")[2]
            if isinstance(module, nn.Conv2d):
                if init == "fan-in":
                    nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
                else:
                    nn.init.normal_(module.weight, std=0.01)
                if module.bias is not None:
                    nn.init.constant_(module.bias, biases["conv"])
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01 if name == "fc8" else 0.005)
                nn.init.constant_(module.bias, biases[name])

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (self.img_size, self.img_size):
            height, width = images.shape[-2:]
            raise RecipeError(
                f"model.args.img_size: the network takes images of {self.img_size} px, and these "
                f"have {height} x {width}; valid: the same as data.image_size"
            )
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits
