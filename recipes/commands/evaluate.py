"""The command ``largebatch evaluate``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import is_reported_here
from .options import Ema, Overrides, RecipeOfWeights, RunWeightsOrName, TrustCode


def evaluate(
    run: RunWeightsOrName,
    overrides: Overrides = None,
    recipe: RecipeOfWeights = None,
    ema: Ema = False,
    trust_code: TrustCode = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Evaluate trained weights: accuracy, its interval, loss.

    The recipe is that in the run's folder, or beside a file of weights. As it is, the result is
    that of the run's own evaluation of these weights; any key can be overridden, such as the data
    or the size of the images. Weights that timm has published are named timm:NAME, with a name of
    timm.list_pretrained(), and are measured as timm does: its size, crop, interpolation and
    normalisation of images.

    \b
      largebatch evaluate runs/digits/2026-01-31_10-00-00
      largebatch evaluate RUN data.eval_size=288 data.eval_resize=320
      largebatch evaluate RUN data.path=/data/imagenet-v2
      largebatch evaluate resnet50.safetensors --recipe resnet50-b4096
      largebatch evaluate timm:resnet50.a1_in1k data.path=/data/imagenet

    On several GPUs, torchrun starts one process for each:

    \b
      torchrun --nproc-per-node GPUS
          -m largebatch.recipes evaluate RUN [KEY=VALUE]...
    """
    import json
    import os

    from ..launcher import is_first_of_machine
    from ..ranks import device_of, joined
    from ..trained.pretrained import open_weights
    from ..trained.score import for_evaluation, score
    from ..training.process import reported_once

    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The processes of a machine read the same files and see the same GPUs: one of them reports.
    with reported_once(is_first_of_machine):
        trained = open_weights(
            run, for_evaluation(overrides or []), recipe=recipe, ema=ema, trust_code=trust_code
        )
        device_of(trained.loaded.recipe, local_world_size - 1)
    with reported_once(is_reported_here), joined(trained.loaded.recipe) as job:
        found = score(trained, job)
    if not job.is_main:
        return
    if found.left_out:
        typer.echo(f"largebatch: warning: {found.left_out}", err=True)
    for line in trained.notices:
        typer.echo(line, err=True)
    values = found.as_json(trained)
    if json_:
        print(json.dumps(values, indent=2))
        return
    low, high = found.top1_interval
    what = "moving average of the weights, " if trained.ema else ""
    print(
        f"{trained.source}: {what}{trained.loaded.recipe.model.name} of {trained.origin}, "
        f"{found.precision} on {found.device}"
    )
    skipped = f", {found.skipped_images:,} skipped" if found.skipped_images else ""
    how = values["eval_interpolation"]
    print(
        f"{found.images:,} images{skipped}, {values['data']}, at {values['image_size']} px of "
        f"{values['eval_resize']}{'' if how == 'bilinear' else f' ({how})'}, decoded by "
        f"{found.backend}"
    )
    print(f"top-1  {found.top1:6.2f} %  (95 % interval {low:.2f} to {high:.2f})")
    print(f"top-5  {found.top5:6.2f} %")
    print(f"loss   {found.loss:6.4f}")
