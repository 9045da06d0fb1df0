"""The model card of an export: README.md in the form of the Hugging Face Hub."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ...pipeline import without_query
from ..files import number, whole
from ..models.build import OWN_MODELS
from ..schema.dotted_path import is_dotted_path
from ..schema.load import dump
from ..schema.recipe import Recipe
from ..schema.sections import Resume
from ..training.folder.ending import versions
from ..training.folder.outcome import metrics_of
from .score import data_in_words, wilson
from .source import Trained

Target = Literal["timm", "safetensors", "onnx"]
CARD = "README.md"


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of weights, as their run evaluated them.

    Attributes:
        top1: In percent.
        top5: In percent.
        loss: Mean cross-entropy; None if it was not finite.
        step: Step of the run.
        images: Number of images; None if it is not recorded.
    """

    top1: float
    top5: float
    loss: float | None
    step: int
    images: int | None


def accuracy_of(trained: Trained) -> Accuracy | None:
    """The run's own evaluation of these weights; None if it made none at their step.

    That of ``weights.pt`` is in the summary, which is written with it. The metrics may have gone on
    since.
    """
    if trained.run_dir is None or trained.step is None:
        return None
    about = trained.about
    prefix = "ema_" if trained.ema else ""
    if trained.source.is_dir():
        names = (f"{prefix}top1", f"{prefix}top5", f"{prefix}loss")
        found = _logged(trained.run_dir, trained.step, names[0])
    else:
        names = (f"{prefix}top1", f"{prefix}top5", f"{prefix}val_loss")
        # A summary of an earlier version does not have the step: that of the weights, unless the
        # run did not evaluate.
        evaluated = about.get("evaluated_step", about.get("val_images") and trained.step)
        found = about if evaluated == trained.step else {}
    top1, top5, loss = (number(found.get(name)) for name in names)
    if top1 is None or top5 is None:
        return None
    # Images that were skipped were not evaluated, and how many of these is not recorded.
    all_used = about.get("skipped_images") == 0
    return Accuracy(
        top1=top1,
        top5=top5,
        loss=loss,
        step=trained.step,
        images=whole(about.get("val_images")) if all_used else None,
    )


def _logged(run_dir: Path, step: int, name: str) -> dict[str, Any]:
    """The line of the metrics about the evaluation at a step; empty without one."""
    lines = reversed(metrics_of(run_dir).val)
    return next((line for line in lines if line["step"] == step and name in line), {})


def write_card(
    folder: Path, trained: Trained, model: nn.Module, target: Target, accuracy: Accuracy | None
) -> None:
    """Write ``README.md``: recipe, data, accuracy, versions, and how to load the weights.

    Args:
        folder: Folder of the export.
        trained: The weights and their recipe.
        model: The model that holds them.
        target: Form of the export.
        accuracy: Accuracy of the weights, if it was measured.
    """
    recipe = _by_last_part(trained.loaded.recipe)
    trained = replace(trained, loaded=replace(trained.loaded, recipe=recipe))
    outputs = len(trained.classes)
    parts = [
        f"---\n{_metadata(trained, target, accuracy)}\n---\n",
        f"# {recipe.model.name}, trained by the recipe {trained.name}\n",
        _about(trained, model, target),
        f"## Accuracy\n\n{_accuracy(trained, accuracy)}",
        f"## Use\n\n{_use(recipe, target)}",
        f"## Images\n\n{_images(recipe, outputs)}",
        f"## Training\n\n{_training(trained)}",
        f"## Versions\n\n{_versions(trained)}",
        "## Recipe\n\nEvery key; of the paths of data and initial weights, the last part:\n\n"
        f"```yaml\n{dump(recipe)}```\n",
    ]
    (folder / CARD).write_text("\n".join(parts), encoding="utf-8")


def published(recipe: Recipe) -> Recipe:
    """A recipe without the places of its run: ``run_dir``, ``resume`` and ``init.from``."""
    init = recipe.init.model_copy(update={"from_": None})
    return recipe.model_copy(update={"run_dir": None, "resume": Resume(), "init": init})


def _by_last_part(recipe: Recipe) -> Recipe:
    """The recipe to publish, with the names of its data and initial weights for their paths."""
    init = recipe.init.model_copy(update={"from_": _last_part(recipe.init.from_)})
    data = recipe.data.model_copy(update={"path": _last_part(recipe.data.path)})
    return published(recipe).model_copy(update={"init": init, "data": data})


def _last_part(path: str | None) -> str | None:
    return Path(without_query(path)).absolute().name if path else None


def _metadata(trained: Trained, target: Target, accuracy: Accuracy | None) -> str:
    """The YAML head. A license is the owner's to add."""
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    if accuracy:
        data = data_in_words(trained.loaded.recipe)
        measured = {"Top-1 accuracy": accuracy.top1, "Top-5 accuracy": accuracy.top5}
        results = [
            EvalResult(
                task_type="image-classification",
                task_name="Image classification",
                dataset_type=trained.loaded.recipe.data.path or "random",
                dataset_name=data,
                metric_type="accuracy",
                metric_name=name,
                metric_value=round(value, 4),
            )
            for name, value in measured.items()
        ]
    library = {"timm": "timm", "safetensors": "pytorch", "onnx": "onnx"}[target]
    card = ModelCardData(
        library_name=library,
        pipeline_tag="image-classification",
        tags=["image-classification", library, "largebatch"],
        metrics=["accuracy"],
        model_name=trained.name if results else None,
        eval_results=results or None,
    )
    return str(card.to_yaml()).strip()


def _about(trained: Trained, model: nn.Module, target: Target) -> str:
    recipe = trained.loaded.recipe
    count = sum(parameter.numel() for parameter in model.parameters())
    weights = "the moving average of the weights" if trained.ema else "the weights"
    where = f" at step {trained.step:,}" if trained.step is not None else ""
    form = {"timm": "for timm", "safetensors": "as safetensors", "onnx": "as ONNX"}[target]
    return _filled(
        f"{count / 1e6:,.1f} M parameters. These are {weights}{where} in FP32, with batch norm's "
        f"running statistics as they were trained, exported {form} by largebatch from a run on "
        f"{recipe.data.path or 'random images'}."
    )


def _accuracy(trained: Trained, accuracy: Accuracy | None) -> str:
    recipe = trained.loaded.recipe
    if accuracy is None:
        return _filled(
            "Not measured by the run at these weights. `largebatch evaluate` measures it, also on "
            "the exported file."
        )
    table = f"| top-1 | top-5 | loss |\n|---:|---:|---:|\n| {accuracy.top1:.2f} % |"
    loss = "–" if accuracy.loss is None else f"{accuracy.loss:.4f}"  # noqa: RUF001
    table += f" {accuracy.top5:.2f} % | {loss} |\n"
    data = data_in_words(recipe)
    images = f"those images of {data} that could be used (their number is not recorded)"
    if accuracy.images:
        images = f"{accuracy.images:,} images of {data}"
    what = (
        f"Measured by the run itself at step {accuracy.step:,} on {images}: the central "
        f"{recipe.eval_size} px of images whose shorter side is resized to "
        f"{recipe.data.eval_resize}, in {trained.precision or recipe.precision}, one seed."
    )
    if accuracy.images:
        low, high = wilson(accuracy.top1, accuracy.images)
        what += (
            f" The 95 % interval of top-1 for that many images is {low:.2f} to {high:.2f} %; it "
            "does not cover other seeds, nor that settings may have been chosen on these images."
        )
    return f"{table}\n{_filled(what)}"


def _use(recipe: Recipe, target: Target) -> str:
    return {"timm": _use_timm, "safetensors": _use_safetensors, "onnx": _use_onnx}[target](recipe)


def _use_timm(recipe: Recipe) -> str:
    return """In this folder:

```python
import timm

model = timm.create_model("local-dir:.", pretrained=True).eval()
config = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**config, is_training=False)
```

`hf-hub:USER/NAME` in place of `local-dir:.` loads it from the Hub, once this folder is uploaded
there. With `timm.create_model(..., checkpoint_path="model.safetensors")`, number of classes and
arguments are those of `config.json`.
"""


def _use_safetensors(recipe: Recipe) -> str:
    name, args = recipe.model.name, recipe.model.args
    given = "".join(f", {key}={value!r}" for key, value in args.items())
    if name in OWN_MODELS:
        module, kind = OWN_MODELS[name].__module__, OWN_MODELS[name].__name__
        make = f"from {module} import {kind}\n", f"{kind}(num_classes=classes{given})"
    elif is_dotted_path(name):
        module, _, kind = name.partition(":")
        first = kind.partition(".")[0]  # of an attribute such as Class.make
        make = f"from {module} import {first}\n", f"{kind}(num_classes=classes{given})"
    else:
        make = "import timm\n", f'timm.create_model("{name}", num_classes=classes{given})'
    return f"""`classes` is the number of classes.

```python
{make[0]}from safetensors.torch import load_file

model = {make[1]}
model.load_state_dict(load_file("model.safetensors"))
model.eval()
```
"""


def _use_onnx(recipe: Recipe) -> str:
    size = recipe.eval_size
    return f"""`images` is FP32 of shape `[batch, 3, {size}, {size}]` for any batch size, and \
`logits`
has shape `[batch, classes]`.

```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
[logits] = session.run(["logits"], {{"images": images}})
```
"""


def _images(recipe: Recipe, outputs: int) -> str:
    data = recipe.data
    text = (
        f"RGB, the shorter side resized to {data.eval_resize} px ({data.eval_interpolation}, "
        f"antialiased), the central {recipe.eval_size} x {recipe.eval_size} px, scaled to [0, 1], "
        f"then minus the mean {list(data.mean)}, divided by {list(data.std)}."
    )
    if outputs:
        text += f" `classes.txt` has the names of the {outputs:,} classes in the order of outputs."
    return _filled(text)


def _training(trained: Trained) -> str:
    recipe, about = trained.loaded.recipe, trained.about
    rows: dict[str, Any] = {
        "recipe": trained.name,
        "data": recipe.data.path or "random images",
        "initial weights": recipe.init.from_,
        "training images": _grouped(about.get("train_images")),
        "batch size": f"{recipe.batch_size:,}",
        "optimizer": f"{recipe.optimizer.name}, peak learning rate {recipe.optimizer.lr:g}, "
        f"weight decay {recipe.optimizer.weight_decay:g}",
        "epochs": f"{recipe.epochs:g}",
        "precision": trained.precision or recipe.precision,
        "seed": recipe.seed,
        "ranks": about.get("world_size"),
        "trained on": (about.get("machine") or {}).get("processor")
        if about.get("device") == "cpu"
        else about.get("device"),
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines, ""])


def _versions(trained: Trained) -> str:
    of_run = trained.about.get("versions")
    lines = []
    if isinstance(of_run, dict):
        lines.append(f"Trained with {_listed(of_run)}.")
    lines.append(f"Exported with {_listed(versions())}.")
    return "\n".join(_filled(line) for line in lines)


def _listed(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _grouped(number: Any) -> str | None:
    return f"{number:,}" if isinstance(number, int) else None


def _filled(text: str) -> str:
    return textwrap.fill(text, 96, break_long_words=False, break_on_hyphens=False) + "\n"
