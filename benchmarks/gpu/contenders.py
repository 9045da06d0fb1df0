"""The contenders of a contest: what each is, and about how long it takes to start.

Seconds are estimates for one H200 and its host; nothing has been measured yet. Where the time does
not suffice, those at the end of a group are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

OURS, BARE, TIMM = "largebatch", "PyTorch loop", "timm's step"
EAGER, COMPILED, TYPED = "eager", "compiled", "recipe as typed"

#: Estimates of the time from the first CUDA call to the first steady step, by ``how``.
_SECONDS = {EAGER: 12.0, COMPILED: 75.0, TYPED: 60.0}


@dataclass(frozen=True)
class Contender:
    """One training loop with one setting, which runs in a process of its own.

    An update takes ``passes`` forward passes of ``batch`` images.
    """

    whose: str
    how: str
    precision: str = "bf16"
    batch: int = 256
    passes: int = 1

    @property
    def name(self) -> str:
        """Says whose it is, how it runs, and what it takes."""
        images = f"{self.batch} x {self.passes}" if self.passes > 1 else f"{self.batch}"
        return f"{self.whose}: {self.how}, {self.precision}, {images}"

    @property
    def ours(self) -> bool:
        """Whether it is our trainer."""
        return self.whose == OURS

    @property
    def typed(self) -> bool:
        """Whether it is our trainer with the recipe as typed."""
        return self.ours and self.how == TYPED

    @property
    def seconds(self) -> float:
        """Estimate of the time to its first steady step."""
        return _SECONDS[self.how]

    @property
    def recipe(self) -> str:
        """The packaged recipe of ours."""
        return "resnet50-jia-b65536" if self.precision == "fp16-master" else "resnet50-b65536"

    @property
    def overrides(self) -> list[str]:
        """Settings of ours beside the recipe that decide what is compared."""
        compile_ = {EAGER: ["compile=false"], COMPILED: ["compile=default"], TYPED: []}[self.how]
        return compile_ + (["precision=fp16"] if self.precision == "fp16" else [])


#: The groups of each call: the members of one take turns, in 80 GB, and have ended before the next
#: one starts. Those that decide most come first.
_BF16 = (
    (BARE, EAGER, "bf16"),
    (OURS, TYPED, "bf16"),
    (BARE, COMPILED, "bf16"),
    (OURS, EAGER, "bf16"),
)
_FP16 = (
    (BARE, EAGER, "fp16"),
    (OURS, TYPED, "fp16-master"),
    (BARE, COMPILED, "fp16"),
    (OURS, TYPED, "fp16"),
    (OURS, EAGER, "fp16-master"),
)
CONTESTS: dict[str, tuple[tuple[Contender, ...], ...]] = {
    call: tuple(
        tuple(Contender(*member, batch, passes) for member in members)
        for members, batch, passes in groups
    )
    for call, groups in {
        "a": (((*_BF16, (TIMM, EAGER, "bf16")), 256, 1), (_BF16, 32, 32)),
        "b": ((_FP16, 256, 1), (_FP16, 32, 32)),
    }.items()
}

#: By what a contender's process is told which it is.
CONTENDERS = {c.name: c for groups in CONTESTS.values() for group in groups for c in group}
