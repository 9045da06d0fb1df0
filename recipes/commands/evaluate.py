"""The command ``largebatch evaluate``."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Ema, Overrides, RecipeOfWeights, RunOrWeights


def evaluate(
    run: RunOrWeights,
    overrides: Overrides = None,
    recipe: RecipeOfWeights = None,
    ema: Ema = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Evaluate trained weights: accuracy with its 95 % interval, and loss.

    The recipe is that in the run's folder, or beside a file of weights. As it is, the result is
    that of the run's own evaluation of these weights; any key can be overridden, such as the data
    or the size of the images.

    \b
      largebatch evaluate runs/digits/2026-01-31_10-00-00
      largebatch evaluate RUN data.eval_size=288 data.eval_resize=320
      largebatch evaluate RUN data.path=/data/imagenet-v2
      largebatch evaluate resnet50.safetensors --recipe resnet50-b4096

    On several GPUs, torchrun starts one process for each:

    \b
      torchrun --nproc-per-node GPUS
          -m largebatch.recipes.commands.app evaluate RUN [KEY=VALUE]...
    """
    import json
    import os

    from ..errors import exit_on_user_error
    from ..ranks import joined
    from ..trained.score import as_json, score
    from ..trained.source import open_trained

    is_main = os.environ.get("RANK", "0") == "0"
    with exit_on_user_error(lambda error: is_main):  # all ranks find the same
        trained = open_trained(run, overrides or [], recipe=recipe, ema=ema)
        with joined(trained.loaded.recipe) as job:
            found = score(trained, job)
    if not is_main:
        return
    for line in trained.notices:
        typer.echo(line, err=True)
    if json_:
        print(json.dumps(as_json(found, trained), indent=2))
        return
    low, high = found.top1_interval
    what = "moving average of the weights, " if trained.ema else ""
    print(
        f"{trained.source}: {what}{trained.loaded.recipe.model.name} of the recipe {trained.name}, "
        f"{found.precision} on {found.device}"
    )
    skipped = f", {found.skipped_images:,} skipped" if found.skipped_images else ""
    print(
        f"{found.images:,} images{skipped}, {found.data}, at {found.image_size} px of "
        f"{found.eval_resize}, decoded by {found.backend}"
    )
    print(f"top-1  {found.top1:6.2f} %  (95 % interval {low:.2f} to {high:.2f})")
    print(f"top-5  {found.top5:6.2f} %")
    print(f"loss   {found.loss:6.4f}")
