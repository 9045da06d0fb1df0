"""Runs as their screens see them, with everything that depends on the machine given."""

from dataclasses import replace

import torch

from largebatch.comm import Topology
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training import build
from largebatch.recipes.training.callbacks import RunContext
from largebatch.recipes.training.folder.place import run_place

CPU = torch.device("cpu")
SYNTHETIC = ["data.source=synthetic", "data.path=null"]


def prepared(name, *keys, ranks=1, per_node=1):
    """A run that was built on the CPU and not started, its components, and the nodes of its ranks.

    What the run says and warns of is in the list of its attribute ``said``.
    """
    loaded = load(name, ["device=cpu", *keys])
    job, topology = Job(0, ranks, min(ranks, per_node), CPU), Topology.of(ranks, per_node)
    place = run_place(loaded, "2026-03-01_12-00-00")
    made = build.prepare(loaded, job, place)
    made = replace(made, plan=build.build_plan(loaded.recipe, topology))
    said = []
    of_both = ("model", "optimizer", "loader", "val_loader", "timeline", "last_step")
    run = RunContext(
        name=loaded.name,
        recipe=loaded.recipe,
        job=job,
        run_dir=place.folder,
        **{name: getattr(made, name) for name in of_both},
        step=0,
        continues=False,
        say=said.append,
        warn=lambda text: said.append(f"largebatch: warning: {text}"),
        stop=said.append,
    )
    return run, made, topology, said
