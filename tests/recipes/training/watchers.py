"""Callbacks that tests name by dotted path in a recipe."""

import torch
import torch.distributed as dist

from largebatch.recipes.training.callbacks import Callback

#: What the callbacks of this process have seen.
SEEN = []


def noted(hook, facts=lambda *arguments: arguments):
    """A hook that notes its name, and facts of what it is called with."""
    return lambda self, *arguments: SEEN.append((hook, *facts(*arguments)))


class Recorder(Callback):
    """Records every hook, on rank 0."""

    def __init__(self, tag="seen"):
        self.tag, self.count = tag, 0

    def check(self, recipe, run_dir, job):
        assert not (run_dir / "recipe.yaml").exists() or recipe.resume.from_
        SEEN.append(("check", job.rank))

    def on_start(self, run):
        assert run.job.rank or (run.run_dir / "recipe.yaml").exists()
        SEEN.append(("start", run.step, run.continues))

    on_step_begin = noted("step begin")

    def on_step_end(self, step):
        self.count += 1
        SEEN.append(("step end", step))

    on_log = noted("log", lambda metrics: (metrics.split, metrics.step))
    on_evaluation_begin = noted("evaluation begin")
    on_evaluation_end = noted("evaluation end", lambda step, values: (step, sorted(values)))
    on_checkpoint = noted("checkpoint", lambda step, path: (step, (path / "state.json").exists()))
    on_end = noted("end", lambda status, summary: (status, "step" in summary))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class OnAllRanks(Recorder):
    """Takes part in a collective at each step."""

    all_ranks = True

    def on_step_end(self, step):
        total = torch.ones(())
        dist.all_reduce(total)
        self.count += int(total)


class Fails(Callback):
    """Fails in the given hook."""

    def __init__(self, hook):
        self.hook = hook

    def on_step_end(self, step):
        self.fail("on_step_end")

    def on_end(self, status, summary):
        self.fail("on_end")

    def fail(self, hook):
        if hook == self.hook:
            raise ValueError("out of order")

    def state_dict(self):
        return {"held": {1, 2}} if self.hook == "state_dict" else {}


def not_a_callback():
    return object()
