"""The contenders of ``fast``: what each is, about how long it takes to start, and its weight.

Seconds are estimates for one H200 and its host; nothing has been measured yet. Where the time does
not suffice for all, :func:`choose` leaves out those of the least weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

OURS, BARE, TIMM = "largebatch", "PyTorch loop", "timm's step"

#: The recipe as a user types it, but for the batch size and the data, and its rate at 256 images.
TYPED = f"{OURS}: recipe as typed"
#: The flagship at the micro-batch that it names, 32 of which are a step; and at 256
#: images.
SMALL, LARGE = f"{OURS}: FP16 with masters, 32 x 32", f"{OURS}: FP16 with masters, 256"


@dataclass(frozen=True)
class Contender:
    """One training loop with one setting, which runs in a process of its own.

    Attributes:
        name: says whose it is and the setting.
        group: contenders of one group take turns; groups run in the order of the table.
        seconds: estimate of the time from its first CUDA call to its first steady step.
        weight: the larger, the more it says about the goals.
        precision: ``bf16``, or ``fp16-master``, where the others use autocast and GradScaler.
        batch: images per forward pass.
        steps: forward passes per update.
        benchmark: whether ``torch.backends.cudnn.benchmark`` is on; of the others.
        compile: mode of torch.compile; of the others.
        graph: whether the whole step is one CUDA graph; of the others. Ours have it in
            ``overrides``, as what the recipe refuses if it cannot be captured.
        recipe: recipe, of ours.
        overrides: further settings of ours, as ``key=value``.
    """

    name: str
    group: str
    seconds: float
    weight: int
    precision: str = "bf16"
    batch: int = 256
    steps: int = 1
    benchmark: bool = True
    compile: str | None = None
    graph: bool = False
    recipe: str = "resnet50-b65536"
    overrides: tuple[str, ...] = ()

    @property
    def whose(self) -> str:
        """``OURS``, ``BARE`` or ``TIMM``."""
        return self.name.partition(":")[0]

    @property
    def ours(self) -> bool:
        """Whether it is our trainer."""
        return self.whose == OURS

    @property
    def main(self) -> bool:
        """Whether it has the main load, BF16 at 256 images, and not that of the flagship."""
        return (self.precision, self.batch) == ("bf16", 256)


def _table() -> tuple[Contender, ...]:
    small: dict[str, Any] = {"precision": "fp16-master", "batch": 32, "steps": 32}
    jia: dict[str, Any] = {"precision": "fp16-master", "recipe": "resnet50-jia-b65536"}
    one = Contender
    return (
        one(TYPED, "eager", 12, 100),
        one(f"{BARE}: cudnn.benchmark", "eager", 12, 95),
        one(f"{TIMM}: cudnn.benchmark", "eager", 12, 60),
        one(f"{BARE}: plain", "eager", 5, 40, benchmark=False),
        one(f"{BARE}: compiled", "compiled", 75, 90, compile="default"),
        one(f"{OURS}: compiled", "compiled", 60, 85, overrides=("compile=default",)),
        one(f"{TIMM}: compiled", "compiled", 45, 12, compile="default"),
        one(f"{BARE}: graph", "graphs", 14, 80, graph=True),
        one(f"{TIMM}: graph", "graphs", 14, 15, graph=True),
        one(f"{BARE}: compiled, graph", "compiled-graphs", 35, 88, compile="default", graph=True),
        one(
            f"{OURS}: reduce-overhead",
            "compiled-graphs",
            35,
            20,
            overrides=("compile=reduce-overhead",),
        ),
        one(f"{TIMM}: compiled, graph", "compiled-graphs", 35, 10, compile="default", graph=True),
        one(f"{BARE}: max-autotune", "max-autotune", 180, 30, compile="max-autotune"),
        one(f"{OURS}: max-autotune", "max-autotune", 100, 28, overrides=("compile=max-autotune",)),
        one(SMALL, "fp16", 12, 76, batch=32, steps=32, **jia),
        one(LARGE, "fp16", 12, 75, **jia),
        one(f"{BARE}: FP16, 256", "fp16", 12, 74, precision="fp16-master"),
        one(f"{BARE}: FP16, 32 x 32", "fp16", 12, 50, **small),
        one(f"{BARE}: FP16, 32 x 32, graph", "fp16", 14, 48, graph=True, **small),
    )


CONTENDERS = {contender.name: contender for contender in _table()}

#: Our step without graphs and compilation, whose parts a trace can tell apart; for ``why``.
EAGER = Contender(f"{OURS}: eager", "why", 30, 0, overrides=("compile=false",))

GROUPS = tuple(dict.fromkeys(contender.group for contender in CONTENDERS.values()))

#: Seconds in which all processes import their packages, side by side.
IMPORT_SECONDS = 25.0
#: A round gives each contender one block of about this many seconds.
BLOCK_SECONDS, ROUNDS = 0.7, 4
#: Contenders that stay for later groups: the best rival, our best setting, the recipe as typed.
_STAY = 3
#: At the end those three take turns in blocks of this length: 30 seconds each.
LONG_BLOCK_SECONDS, LONG_ROUNDS = 10.0, 3
SUSTAINED_SECONDS = _STAY * LONG_BLOCK_SECONDS * LONG_ROUNDS + 5
#: But those turns take no more than this share of the time; then they are fewer.
SUSTAINED_SHARE = 0.2


def cost(contenders: Iterable[Contender]) -> float:
    """Estimate the seconds in which ``contenders`` start and take their turns."""
    chosen = list(contenders)
    groups = {contender.group for contender in chosen if contender.main}
    blocks = len(chosen) + _STAY * max(0, len(groups) - 1)
    return sum(c.seconds for c in chosen) + ROUNDS * BLOCK_SECONDS * blocks


def choose(
    contenders: Iterable[Contender], seconds: float
) -> tuple[list[Contender], list[Contender]]:
    """Split ``contenders`` into those that fit into ``seconds``, by weight, and the others.

    One that does not fit does not exclude a cheaper one of less weight. Both lists keep the order.
    """
    everyone = list(contenders)
    kept: list[Contender] = []
    for contender in sorted(everyone, key=lambda c: -c.weight):
        if cost([*kept, contender]) <= seconds:
            kept.append(contender)
    return [c for c in everyone if c in kept], [c for c in everyone if c not in kept]
