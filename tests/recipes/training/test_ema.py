"""The moving average of the weights: its definition, evaluation, export and resume."""

import json

import pytest
import torch
from torch import nn

from largebatch.recipes.ranks import Job
from largebatch.recipes.training.evaluate import WeightAverage
from largebatch.recipes.training.folder.metrics import read_metrics
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, largest_difference, make, train, weights
from tests.recipes.training.test_resume import timeless

pytestmark = pytest.mark.slow("trains small networks, some on two ranks")

EMA = ["ema.decay=0.6", "optimizer.lr=0.1"]


def follow(trainer):
    """Run, and return the exact weights and statistics at the start and after each update."""
    average, seen = trainer.ema, [exact(trainer)]
    update = average.update

    def noted():
        update()
        seen.append(exact(trainer))

    average.update = noted
    trainer.run()
    return seen


def exact(trainer):
    """Weights and statistics in double precision, from masters where there are any."""
    state = trainer.optimizer.state
    held = dict(trainer.model.named_parameters())
    found = {n: state[p]["master"] if "master" in state.get(p, {}) else p for n, p in held.items()}
    found |= {n: b for n, b in trainer.model.named_buffers() if b.is_floating_point()}
    return {name: value.detach().double().clone() for name, value in found.items()}


def by_hand(seen, decay):
    """The definition, in double precision."""
    average = seen[0]
    for n, now in enumerate(seen[1:], 1):
        d = min(decay, (1 + n) / (10 + n))
        average = {name: d * average[name] + (1 - d) * now[name] for name in now}
    return average


def test_the_average_follows_its_definition(photos, tmp_path):
    decay = 0.3  # which the fourth step reaches
    trainer = make(photos, tmp_path, *EMA, f"ema.decay={decay}", "evaluate_every=null")
    seen = follow(trainer)
    assert len(seen) - 1 == trainer.ema.updates == 7
    ours = torch.load(tmp_path / "weights_ema.pt")
    assert ours.keys() == weights(trainer).keys()
    theirs = by_hand(seen, decay)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-5, atol=1e-6)
    assert largest_difference(theirs, seen[-1]) > 1e-3  # so that the comparison can fail
    assert ours["bn1.num_batches_tracked"] == trainer.model.bn1.num_batches_tracked


@pytest.mark.parametrize(("name", "optimizer"), [("bf16-master", "sgd"), ("fp16-master", "muon")])
def test_the_average_is_fp32_where_the_model_is_half(photos, tmp_path, name, optimizer):
    keys = [f"precision={name}", "loss_scale=128", f"optimizer.name={optimizer}", "stop_after=4"]
    keys += ["micro_batch_size=16"]  # convolutions in half precision are slow on a CPU
    trainer = make(photos, tmp_path, *EMA, *keys, "ema.decay=0.999")
    theirs = by_hand(follow(trainer), 0.999)
    ours = torch.load(tmp_path / "weights_ema.pt")
    assert {v.dtype for v in ours.values()} == {torch.float32, torch.int64}
    for key, value in theirs.items():  # the average moves by less than half precision can resolve
        torch.testing.assert_close(ours[key].double(), value, rtol=2e-6, atol=1e-7)
    assert "ema_top1" in read_metrics(tmp_path)[-1]


def test_the_average_is_evaluated_without_changing_the_training(photos, tmp_path, capsys):
    plain = train(photos, tmp_path / "plain", EMA[1])
    trainer = make(photos, tmp_path / "ema", *EMA)
    trainer.run()
    assert_same(weights(trainer), plain)
    output = capsys.readouterr().out
    lines, theirs = (
        [timeless(line) for line in read_metrics(tmp_path / run)] for run in ("ema", "plain")
    )
    extra = {"ema_loss", "ema_top1", "ema_top5"}
    assert [{k: v for k, v in line.items() if k not in extra} for line in lines] == theirs
    val = [line for line in lines if line["split"] == "val"]
    assert len(val) == 2
    assert all(extra < line.keys() for line in val)
    # The exported weights have the loss that was logged.
    trainer.model.load_state_dict(torch.load(tmp_path / "ema" / "weights_ema.pt"))
    trainer.model.eval()
    batches = [(images, labels) for images, labels in trainer.val_loader]
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(trainer.model(x), y, reduction="sum") for x, y in batches
        ]
    assert sum(losses).item() / 23 == pytest.approx(val[-1]["ema_loss"], rel=1e-5)
    assert val[-1]["ema_loss"] != pytest.approx(val[-1]["loss"], rel=1e-4)
    summary = json.loads((tmp_path / "ema" / "summary.json").read_text())
    assert summary["ema_top1"] == val[-1]["ema_top1"]
    assert summary["ema_top5"] == val[-1]["ema_top5"]
    assert summary["ema_val_loss"] == val[-1]["ema_loss"]
    assert f"  EMA {val[-1]['ema_top1']:6.2f}%  evaluated in " in output
    assert "\n  EMA top-1 " in output
    assert not (tmp_path / "plain" / "weights_ema.pt").exists()


@pytest.mark.parametrize(("own", "average", "steps"), [(49.0, 51.0, 7), (51.0, 49.0, 1)])
def test_target_accuracy_applies_to_the_weights_not_to_their_average(
    photos, tmp_path, monkeypatch, own, average, steps
):
    for module, top1 in (("trainer", own), ("evaluate", average)):
        values = {"loss": 1.0, "top1": top1, "top5": 100.0}
        path = f"largebatch.recipes.training.{module}.evaluate"
        monkeypatch.setattr(path, lambda *a, values=values: dict(values))
    trainer = make(photos, tmp_path, *EMA, "target_accuracy=50", "evaluate_every=1")
    trainer.run()
    assert trainer.step == steps


def test_averaging_may_be_switched_on_or_off_on_resume(photos, tmp_path, capsys):
    train(photos, tmp_path / "a", EMA[1], "stop_after=3")
    late = make(photos, tmp_path / "a", *EMA, "resume=true")
    assert "ema.decay is now 0.6, was null" in capsys.readouterr().out
    assert late.ema.updates == 0
    assert_same(late.ema.parameters, {n: p.detach() for n, p in late.model.named_parameters()})
    late.run()
    assert late.ema.updates == 4
    train(photos, tmp_path / "b", *EMA, "stop_after=3")
    assert make(photos, tmp_path / "b", EMA[1], "resume=true").ema is None


def on_ranks(root, folder):
    whole = make(root, folder / "whole", *EMA)
    seen = follow(whole)
    own = {n: whole.ema.buffers[n].clone() for n in whole.ema.buffers}
    train(root, folder / "part", *EMA, "stop_after=4")
    train(root, folder / "part", *EMA, "resume=true")
    values = [{n: v[n] for n in own} for v in seen]
    return by_hand(values, 0.6), own, weights(whole)


def test_each_rank_averages_its_statistics_and_files_hold_their_mean(photos, tmp_path):
    results = run_ranks(2, on_ranks, photos, tmp_path)
    exported = torch.load(tmp_path / "whole" / "weights_ema.pt")
    assert_same(torch.load(tmp_path / "part" / "weights_ema.pt"), exported)
    (first, own, _), (second, others, _) = results
    assert any(not torch.equal(own[n], others[n]) for n in own)
    for name in own:
        mean = (first[name] + second[name]) / 2
        torch.testing.assert_close(exported[name].double(), mean, rtol=1e-4, atol=1e-6)
    # On another number of ranks, statistics continue from that mean.
    keys = [*EMA, "resume=true", "resume.reshard=true", "epochs=3"]
    alone = make(photos, tmp_path / "whole", *keys)
    for name in own:
        torch.testing.assert_close(alone.ema.buffers[name], exported[name])


def test_shared_weights_are_averaged_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    average = WeightAverage(model, torch.optim.SGD(model.parameters(), 0.1), 0.1)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.add_(2)
    average.update()
    content = average.state_dict(Job(0, 1, 1, torch.device("cpu")))
    assert content.keys() == start.keys()
    for name in ("0.weight", "2.weight"):
        torch.testing.assert_close(content[name], start[name] + 1.8)
    assert torch.equal(model[0].weight, start["0.weight"] + 2)
