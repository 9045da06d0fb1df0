"""Runs as the trainer writes them, without training."""

import json
import random

from largebatch.recipes.schema.load import dump, load
from largebatch.recipes.training.timeline import learning_rates, timeline_of

IMAGES = 1437
#: Shares of the time of a line of :func:`with_phases`, in percent.
SHARES = {
    **{"input_seconds": 15, "forward_seconds": 20, "backward_seconds": 40},
    **{"all_reduce_seconds": 10, "optimizer_seconds": 5, "rest": 10},
}


def with_phases(line, scale=1.0):
    """A line of training with the phases of :data:`SHARES`; others unchanged."""
    if line["split"] != "train":
        return line
    of = line["seconds"] / 100 * scale
    return line | {key: share * of for key, share in SHARES.items() if key != "rest"}


def diverge(line):
    """A line with a loss that is not finite at step 30."""
    return line | {"loss": None} if line["step"] == 30 and line["split"] == "train" else line


def write_run(folder, *keys, seed=0, steps=None, top1=90.0, summary=True, edit=lambda line: line):
    """Write a run of digits that logged every 10 steps and was evaluated every 20.

    Its seed also draws its values; ``steps`` are those that it made, and ``top1`` its last
    accuracy. ``edit`` is applied to each line, and leaves it out by None. Returns timeline, lines.
    """
    recipe = load("digits", ["log_every=10", f"seed={seed}", *keys]).recipe
    timeline = timeline_of(recipe, IMAGES)
    schedule = learning_rates(recipe, timeline).schedule
    draw = random.Random(seed)
    last = timeline.total_steps if steps is None else steps
    lines = []
    for step in [*range(10, last, 10), last]:
        at = {"step": step, "epoch": round(timeline.epoch(step), 4)}
        made = (step - 1) % 10 + 1
        train = {"loss": 2.0 / step + draw.random(), "top1": 50.0, "top5": 80.0}
        train |= {"lr": schedule(step - 1), "images_per_second": 100.0 + draw.random()}
        train |= {"seconds": made * recipe.batch_size / 100, "wait_seconds": 0.5}
        train["step_wait_seconds"] = [0.5 / made] * made
        lines.append({"split": "train", **at, **train})
        if step % 20 == 0 or step == last:
            reached = top1 * step / last
            val = {"loss": 1.0 - step / 1000, "top1": reached, "top5": 99.0, "seconds": 1.5}
            lines.append({"split": "val", **at, **val})
    lines = [line for line in map(edit, lines) if line is not None]
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("# The recipe digits as it ran.\n" + dump(recipe))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary:
        about = {"recipe": "digits", "step": last, "world_size": 1, "device": "cpu"}
        (folder / "summary.json").write_text(json.dumps(about))
    return timeline, lines


def append(folder, *lines):
    """Write further lines, as text or to be written as JSON."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines((n if isinstance(n, str) else json.dumps(n)) + "\n" for n in lines)


def end_diverged(folder, reason):
    """Write how a run ended that diverged."""
    ending = {"status": "diverged", "reason": reason}
    (folder / "ending.json").write_text(json.dumps(ending))
