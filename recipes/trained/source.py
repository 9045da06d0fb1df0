"""Trained weights and the recipe that they belong to, from a run, a checkpoint or a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RecipeError
from ..files import DamagedFileError, object_in, read_text, text, whole
from ..models.build import build_model, classifier
from ..schema.dotted_path import is_dotted_path
from ..schema.load import RECIPE, Loaded, load
from ..training.folder import checkpoint
from ..training.folder.names import CLASSES, SUMMARY, WEIGHTS, WEIGHTS_EMA
from ..training.folder.weights import read_weights, source_of

#: The argument of the commands that takes weights, as their messages name it.
KEY = "RUN"


@dataclass(frozen=True)
class Trained:
    """Trained weights, and what is known of them."""

    source: Path  # the file or checkpoint folder that holds the weights
    weights: dict[str, Tensor]  # the model's state dict, on the CPU
    loaded: Loaded  # the recipe, with overrides
    origin: str  # where the model's settings come from, in words
    ema: bool = False  # whether they are the moving average of a run's weights
    run_dir: Path | None = None  # None for a file that is in no run's folder
    #: The run's summary, or the checkpoint's state; empty without.
    about: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # names in the order of the outputs; empty if not known
    notices: tuple[str, ...] = ()  # lines to show

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return self.loaded.name

    @property
    def precision(self) -> str | None:
        """The precision that they were trained in; None if it is not known."""
        found = self.about.get("precision")
        return text(found.get("name") if isinstance(found, dict) else found)

    @property
    def step(self) -> int | None:
        """The step of the run after which they are; None if it is not known."""
        return whole(self.about.get("step"))

    def build(self) -> nn.Module:
        """Build the recipe's model with these weights, in FP32 on the CPU, for evaluation."""
        recipe = self.loaded.recipe.model
        outputs = len(self.classes) or 1000
        model = build_model(recipe, outputs)
        head = classifier(model, model.state_dict())
        rows = {len(self.weights[name]) for name in head if name in self.weights}
        if len(rows) == 1 and rows != {outputs}:
            model = build_model(recipe, rows.pop())
        self._fill(model, recipe.name)
        return model.eval()

    def _fill(self, model: nn.Module, name: str) -> None:
        """Load the weights, of which a tied tensor may have one name only."""
        problem = ""
        try:
            missing, unexpected = model.load_state_dict(self.weights, strict=False)
        except RuntimeError as error:  # with a line for each tensor of another shape
            problem = f"does not fit: {str(error).splitlines()[1].strip().rstrip('.')}"
        else:
            ours = model.state_dict()
            given = {ours[key].data_ptr() for key in self.weights if key in ours}
            missing = [key for key in missing if ours[key].data_ptr() not in given]
            if unexpected:
                problem = f"has {unexpected[0]}, which is not part of {name}"
            elif missing:
                problem = f"has no {missing[0]}, which {name} needs"
        if problem:
            raise RecipeError(
                f"{KEY}: {self.source} {problem}; valid: weights of {name}, or --recipe with the "
                "recipe that they are of"
            )
        if infinite := [key for key, value in self.weights.items() if not value.isfinite().all()]:
            raise RecipeError(
                f"{KEY}: {self.source} has values in {infinite[0]} that are not finite; valid: "
                "weights of a run that has not diverged, such as one of its earlier checkpoints"
            )


def random_images(count: int, size: int) -> Tensor:
    """Random images, FP32, shape ``[count, 3, size, size]``; the same at each call."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def one_line(error: BaseException) -> str:
    """What another package raised, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def open_trained(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    recipe: str | None = None,
    ema: bool = False,
    trust_code: bool = False,
) -> Trained:
    """Read weights and their recipe; its code is imported only with ``trust_code``."""
    if ema and path.is_file():
        raise RecipeError(
            f"--ema: {path} is a file; valid: the folder of a run or checkpoint, or the file of "
            f"the average, {WEIGHTS_EMA}"
        )
    source, passed_over = source_of(path, ema=ema, key=KEY)
    run_dir = source.parent.parent if source.is_dir() else source.parent
    file = run_dir / RECIPE
    is_run, overrides = file.is_file(), list(overrides)
    if recipe is not None:
        loaded = load(recipe, overrides)
    elif is_run:
        loaded = load(str(file), overrides)
        is_own = any(override.startswith("model.name=") for override in overrides)
        if is_dotted_path(loaded.recipe.model.name) and not (is_own or trust_code):
            raise RecipeError(
                f"--trust-code: not given, and {file} has the model {loaded.recipe.model.name}, "
                "which is code to import; valid: --trust-code if you trust it, or --recipe with a "
                "recipe of your own"
            )
    else:
        raise RecipeError(
            f"--recipe: missing, as there is no {RECIPE} beside {source}; valid: the recipe that "
            "the weights are of"
        )
    about = {}  # what the run recorded about them, in its checkpoint or when it wrote the file
    if source.is_dir():
        about = checkpoint.read_state(source)
    elif source.name in (WEIGHTS, WEIGHTS_EMA):
        about = object_in(run_dir / SUMMARY)
    try:
        classes = tuple(read_text(run_dir / CLASSES).splitlines())
    except (OSError, DamagedFileError):
        classes = ()
    return Trained(
        source=source,
        weights=read_weights(source, ema=ema and source.is_dir(), key=KEY),
        ema=ema or source.name == WEIGHTS_EMA,
        loaded=loaded,
        run_dir=run_dir if is_run else None,
        about=about,
        classes=classes,
        notices=passed_over,
        origin=f"the recipe {loaded.name}",
    )
