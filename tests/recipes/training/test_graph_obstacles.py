"""What speaks against replaying steps from CUDA graphs, as far as it is known before the run."""

import pytest
import torch

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.training import cuda_graph, step
from tests.recipes.training.recorded_graph import recorded_graphs
from tests.recipes.training.small import small, small_trainer

__all__ = ["small"]  # a fixture
pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(autouse=True)
def graphs():
    with recorded_graphs():
        yield


CPU = torch.device("cpu")
ADADELTA = ["optimizer.name=Adadelta", "optimizer.args={capturable: true}"]


@pytest.mark.parametrize(
    ("device", "ranks", "keys", "reason"),
    [
        ("meta", 1, [], "the device is meta, which has no CUDA graphs"),
        ("cpu", 2, [], "the gradients of 2 ranks are reduced, which is not captured"),
        ("cpu", 1, ["optimizer.name=sgd"], "SGD reads its learning rate on the host"),
        ("cpu", 1, ["optimizer.name=AdamW"], "AdamW counts its steps on the host"),
        (
            *("cpu", 1, ["optimizer.name=AdamW", "precision=bf16-master"]),
            "AdamW counts its steps on the host",
        ),
        (
            *("cpu", 1, [*ADADELTA, "precision=fp16-master"]),
            "MasterWeights reads on the host whether a step overflowed",
        ),
        (
            *("cpu", 1, [*ADADELTA, "precision=fp16"]),
            "torch's GradScaler reads on the host whether a step of Adadelta overflowed",
        ),
    ],
)
def test_obstacles_are_known_before_the_run(tmp_path, device, ranks, keys, reason):
    made = small_trainer(tmp_path, *keys)
    job = Job(0, ranks, ranks, torch.device(device))
    found = cuda_graph.why_uncaptured("auto", job, made.optimizer, made.precision)
    assert found.startswith(reason)
    assert len(found.splitlines()) == 1
    with pytest.raises(RecipeError, match=r"^cuda_graph: true, but .*; valid: auto or false$"):
        cuda_graph.why_uncaptured(True, job, made.optimizer, made.precision)
    assert cuda_graph.why_uncaptured(False, job, made.optimizer, made.precision) == ""


def test_a_count_on_the_host_is_a_change_outside_of_the_device():
    """timm's LAMB counts in a tensor on the CPU, in place, whatever the device."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.empty(2, device="meta"))], lr=0.1)
    optimizer.param_groups[0]["step"] = torch.zeros(())
    before = cuda_graph.state_of(optimizer)
    assert cuda_graph.state_of(optimizer) == before
    optimizer.param_groups[0]["step"].add_(1)
    after = cuda_graph.state_of(optimizer)
    assert [key for key in after if after[key] != before[key]] == [("group", 0, "step")]


def test_lamb_is_not_captured(tmp_path, capsys):
    keys = ["optimizer.name=lamb", "stop_after=1"]
    small_trainer(tmp_path / "auto", *keys, "cuda_graph=auto")
    shown = capsys.readouterr().out
    assert "cuda_graph: not used: LAMB counts its steps on the host" in shown
    with pytest.raises(RecipeError, match="cuda_graph: true, but LAMB counts its steps on the ho"):
        small_trainer(tmp_path / "true", *keys, "cuda_graph=true")


def test_a_device_without_graphs_is_named_or_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_graph, "RECORDERS", {})
    with pytest.raises(RecipeError, match="cuda_graph: true, but the device is cpu, which has no"):
        small_trainer(tmp_path, "cuda_graph=true")
    assert not (tmp_path / "metrics.jsonl").exists()
    trainer = small_trainer(tmp_path, "cuda_graph=auto")
    assert isinstance(trainer._take_step, step.TrainingStep)
