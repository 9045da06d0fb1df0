"""Trained weights and the recipe that they belong to, from a run, a checkpoint or a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
from ..training.folder.names import CLASSES, SUMMARY
from ..training.folder.outcome import name_of
from ..training.folder.weights import WEIGHTS, WEIGHTS_EMA, damaged_in, read_weights, source_of

#: The argument of the commands that takes weights, as their messages name it.
KEY = "RUN"


@dataclass(frozen=True)
class Trained:
    """Trained weights, and what is known of them.

    Attributes:
        source: The file or checkpoint folder that holds the weights.
        weights: State dict of the model, on the CPU.
        ema: Whether they are the moving average of a run's weights.
        loaded: The recipe, with overrides.
        name: Name of the recipe.
        run_dir: The run's folder; None for a file that is in none.
        about: The run's summary, or the state of the checkpoint; empty if there is neither.
        classes: Names of the classes, in the order of the outputs; empty if they are not known.
        notices: Lines to show.
        origin: Where the model's settings come from, in words.
    """

    source: Path
    weights: dict[str, Tensor]
    ema: bool
    loaded: Loaded
    name: str
    run_dir: Path | None
    about: dict[str, Any]
    classes: tuple[str, ...]
    notices: tuple[str, ...]
    origin: str

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
        """Build the recipe's model with these weights, in FP32 on the CPU, for evaluation.

        Raises:
            RecipeError: They are those of another model; the message names the first tensor that
                does not match.
        """
        recipe = self.loaded.recipe.model
        plain = recipe.model_copy(update={"zero_init_last_norm": False})
        outputs = len(self.classes) or 1000
        model = build_model(plain, outputs)
        head = classifier(model, model.state_dict())
        rows = {len(self.weights[name]) for name in head if name in self.weights}
        if len(rows) == 1 and rows != {outputs}:
            model = build_model(plain, rows.pop())
        self._fill(model, recipe.name)
        return model.eval()

    @torch.no_grad()
    def _fill(self, model: nn.Module, name: str) -> None:
        ours = model.state_dict()
        given = {ours[key].data_ptr() for key in self.weights if key in ours}  # also of tied ones
        optional = "num_batches_tracked"  # absent from old files
        for key in (*self.weights, *ours):
            theirs, value = self.weights.get(key), ours.get(key)
            if value is None:
                problem = f"has {key}, which is not part of {name}"
            elif theirs is None:
                if key.endswith(optional) or value.data_ptr() in given:
                    continue
                problem = f"has no {key}, which {name} needs"
            elif theirs.shape != value.shape:
                shapes = list(theirs.shape), list(value.shape)
                problem = f"has {key} of shape {shapes[0]}, where {name} has {shapes[1]}"
            elif not torch.isfinite(theirs).all():
                raise RecipeError(
                    f"{KEY}: {self.source} has values in {key} that are not finite; valid: weights "
                    "of a run that has not diverged, such as one of its earlier checkpoints"
                )
            else:
                value.copy_(theirs)  # which shares memory with the model
                continue
            raise RecipeError(
                f"{KEY}: {self.source} {problem}; valid: weights of {name}, or --recipe with the "
                "recipe that they are of"
            )


def random_images(count: int, size: int) -> Tensor:
    """Random images, FP32, shape ``[count, 3, size, size]``; the same at each call."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def open_trained(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    recipe: str | None = None,
    ema: bool = False,
    trust_code: bool = False,
) -> Trained:
    """Read weights, and load the recipe that they were trained by.

    Args:
        path: A run's folder, a checkpoint's, or a file of weights, as ``init.from`` takes them.
        overrides: Values to use in place of the recipe's, ``key=value``.
        recipe: Name or path of the recipe; by default that in the run's folder, or beside the file.
        ema: Read the moving average of the run's weights.
        trust_code: Whether to import a model that the recipe in the folder names by dotted path.

    Raises:
        RecipeError: There are no weights or no recipe, or one of them is not valid; or the recipe
            in the folder names code that is not trusted.
    """
    if ema and path.is_file():
        raise RecipeError(
            f"--ema: {path} is a file; valid: the folder of a run or checkpoint, or the file of "
            f"the average, {WEIGHTS_EMA}"
        )
    source = source_of(path, ema=ema, key=KEY)
    run_dir = source.parent.parent if source.is_dir() else source.parent
    is_run = (run_dir / RECIPE).is_file()
    if recipe is None and not is_run:
        raise RecipeError(
            f"--recipe: missing, as there is no {RECIPE} beside {source}; valid: the recipe that "
            "the weights are of"
        )
    if recipe is not None:
        loaded = load(recipe, overrides)
    else:
        called = name_of(run_dir) or run_dir.resolve().name
        overrides = list(overrides)
        loaded = load(str(run_dir / RECIPE), overrides, called=called)
        name = loaded.recipe.model.name
        is_own = any(override.startswith("model.name=") for override in overrides)
        if is_dotted_path(name) and not (is_own or trust_code):
            raise RecipeError(
                f"--trust-code: not given, and {run_dir / RECIPE} has the model {name}, which is "
                "code to import; valid: --trust-code if you trust it, or --recipe with a recipe of "
                "your own"
            )
    weights = read_weights(source, ema=ema and source.is_dir(), key=KEY)
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
        weights=weights,
        ema=ema or source.name == WEIGHTS_EMA,
        loaded=loaded,
        name=loaded.name,
        run_dir=run_dir if is_run else None,
        about=about,
        classes=classes,
        notices=tuple(damaged_in(path, "reading")),
        origin=f"the recipe {loaded.name}",
    )
