"""Callbacks: which hooks are called when and where, their state, and their errors."""

import json
import sys
from unittest import mock

import pytest

from largebatch.recipes.errors import StorageError, TrainingError
from largebatch.recipes.training.callbacks import CallbackError
from largebatch.recipes.training.folder.outcome import outcome_of
from tests.ranks import run_ranks
from tests.recipes.runs import make, refused, train
from tests.recipes.training import watchers

WATCHERS = "tests.recipes.training.watchers"
RECORDER = f"callbacks=[{WATCHERS}:Recorder]"
FAILS = f"callbacks=[{WATCHERS}:Recorder, {{name: '{WATCHERS}:Fails', args: {{hook: HOOK}}}}]"
SHORT = ["stop_after=2", "log_every=2", "evaluate_every=2", "checkpoint.every=null", "track=[]"]


@pytest.fixture(autouse=True)
def seen():
    """What the callbacks of this process see, from the start of a test."""
    watchers.SEEN.clear()
    return watchers.SEEN


def test_hooks_are_called_in_order_and_state_is_restored(photos, tmp_path, seen):
    train(photos, tmp_path, *SHORT, RECORDER)
    values = ["loss", "top1", "top5"]
    assert seen == [
        ("check", 0),
        ("start", 0, False),
        *(("step begin", 0), ("step end", 1), ("step begin", 1), ("step end", 2)),
        ("log", "train", 2),
        *(("evaluation begin", 2), ("evaluation end", 2, values), ("log", "val", 2)),
        ("checkpoint", 2, True),
        ("end", "finished", True),
    ]
    state = tmp_path / "checkpoints" / "step-00000002" / "state.json"
    saved = json.loads(state.read_text())
    assert saved["callbacks"] == {f"{WATCHERS}:Recorder": {"count": 2}}
    # A resumed run restores it, in the same run folder or another.
    again = make(photos, tmp_path, *SHORT, RECORDER, "stop_after=4", "resume=true")
    assert again.callbacks.state_dict() == saved["callbacks"]
    assert again.context.continues
    other = make(photos, tmp_path / "b", *SHORT, RECORDER, "stop_after=4", f"resume={state.parent}")
    assert other.callbacks.state_dict() == saved["callbacks"]
    assert not other.context.continues


def test_arguments_are_passed_and_the_same_callback_may_be_there_twice(photos, tmp_path):
    entries = f"[{WATCHERS}:Recorder, {{name: '{WATCHERS}:Recorder', args: {{tag: x}}}}]"
    found = make(photos, tmp_path, f"callbacks={entries}").callbacks._callbacks
    assert [found[f"{WATCHERS}:Recorder{n}"].tag for n in ("", "#2")] == ["seen", "x"]


def watch_on_ranks(root, folder):
    trainer = make(root, folder, *SHORT, f"{RECORDER[:-1]}, {WATCHERS}:OnAllRanks]")
    trainer.run()
    return watchers.SEEN, trainer.callbacks.state_dict()


def test_hooks_run_on_rank_0_or_on_all_ranks(photos, tmp_path):
    (first, states), (second, other_states) = run_ranks(2, watch_on_ranks, photos, tmp_path)
    names = ("check", "start", "end", "log", "checkpoint", "step end")
    hooks = [[hook for hook, *_ in seen] for seen in (first, second)]
    assert [hooks[0].count(name) for name in names] == [2, 2, 2, 4, 2, 2]
    assert [hooks[1].count(name) for name in names] == [2, 1, 1, 2, 1, 0]
    on_all = f"{WATCHERS}:OnAllRanks"
    assert states[on_all] == other_states[on_all] == {"count": 4}  # two ranks, two steps


@pytest.mark.slow("starts ranks or trains")
@pytest.mark.parametrize("hook", ["on_step_end", "on_end", "state_dict"])
def test_an_error_names_the_callback_and_the_hook(photos, tmp_path, seen, hook):
    problem = "TypeError: Object of type set" if hook == "state_dict" else "ValueError: out of ord"
    message = rf"^callback {WATCHERS}:Fails: {hook}\(\) failed: {problem}"
    with pytest.raises(CallbackError, match=message):
        train(photos, tmp_path, *SHORT, FAILS.replace("HOOK", hook))
    # The callbacks before it are notified of the end of the run and its status.
    finished = hook == "on_end"
    assert seen[-1] == ("end", "finished" if finished else "failed", finished)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        *((SystemExit(143), "stopped"), (KeyboardInterrupt(), "stopped")),
        *((TrainingError("a", "b"), "diverged"), (StorageError("a", "b"), "failed")),
        *((SystemExit(1), "failed"), (ValueError("a"), "failed")),
    ],
)
def test_callbacks_are_told_the_status_that_the_folder_records(
    photos, tmp_path, seen, monkeypatch, capsys, error, status
):
    """And one that then fails is shown, not raised."""
    trainer = make(photos, tmp_path, *SHORT, FAILS.replace("HOOK", "on_end"))
    monkeypatch.setattr(trainer, "_train", mock.Mock(side_effect=error))
    with pytest.raises(type(error)):
        trainer.run()
    assert (seen[-1], outcome_of(tmp_path).state) == (("end", status, False), status)
    assert f"callback {WATCHERS}:Fails: on_end() failed: ValueError" in capsys.readouterr().err


MODULE = """
import torch
from torch import nn
from largebatch.recipes.training.callbacks import Callback


def net(num_classes, width):
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)
    return nn.Sequential(nn.Conv2d(3, width, 3, 4), nn.ReLU(), *head)


def optimizer(groups, lr, betas):
    assert sorted(group["weight_decay"] for group in groups) == [0, 0.1]
    return torch.optim.AdamW(groups, lr, betas=betas)


class Watch(Callback):
    seen = []

    def on_start(self, run):
        self.seen.append((type(run.optimizer).__name__, run.model[0].out_channels))
"""


def test_modules_of_the_current_folder_give_the_model_the_optimizer_and_a_callback(
    photos, tmp_path, monkeypatch
):
    """And one that cannot be imported is refused with the reason."""
    (tmp_path / "here_of_user.py").write_text(MODULE)
    (tmp_path / "broken_of_user.py").write_text("import no_such_dependency\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    keys = ["model.name=here_of_user:net", "model.args={width: 6}", "optimizer.weight_decay=0.1"]
    keys += ["optimizer.name=here_of_user:optimizer", "optimizer.args={betas: [0.8, 0.9]}"]
    train(photos, tmp_path / "run", *SHORT, *keys, "callbacks=[here_of_user:Watch]")
    assert sys.modules["here_of_user"].Watch.seen == [("AdamW", 6)]
    problem = "ModuleNotFoundError: No module named 'no_such_dependency'"
    message = refused(make, photos, tmp_path / "other", "callbacks=[broken_of_user:Mine]")
    assert message == f"callbacks: broken_of_user cannot be imported: {problem}"
