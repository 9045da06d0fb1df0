"""The moving average of the weights: its definition, evaluation, export and resume."""

import json

import pytest
import torch
import torch.nn.functional as F

from largebatch.recipes.training.folder.metrics import read_metrics
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, largest_difference, timeless, weights
from tests.recipes.training.small import small_networks, small_trainer

pytestmark = [
    pytest.mark.slow("trains small networks, some on two ranks"),
    pytest.mark.usefixtures("small"),
]

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


@pytest.mark.parametrize(
    ("precision", "optimizer", "decay"),
    [
        ("fp32", "lars", 0.3),  # which the fourth step reaches
        # The average moves by less than half precision can resolve.
        ("bf16-master", "sgd", 0.999),
        ("fp16-master", "muon", 0.999),
    ],
)
def test_the_average_follows_its_definition_in_fp32(tmp_path, precision, optimizer, decay):
    keys = [*EMA, f"precision={precision}", f"optimizer.name={optimizer}", f"ema.decay={decay}"]
    keys += ["loss_scale=128"] if "fp16" in precision else []
    with small_networks(hidden=8):
        trainer = small_trainer(tmp_path, *keys)
    seen = follow(trainer)
    assert len(seen) - 1 == trainer.ema.updates == 8
    ours, theirs = torch.load(tmp_path / "weights_ema.pt"), by_hand(seen, decay)
    assert ours.keys() == weights(trainer).keys()
    assert {v.dtype for v in ours.values()} == {torch.float32, torch.int64}
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key].double(), value, rtol=2e-6, atol=1e-7)
    assert largest_difference(theirs, seen[-1]) > 1e-3  # so that the comparison can fail
    assert ours["1.num_batches_tracked"] == trainer.model[1].num_batches_tracked
    assert "ema_top1" in read_metrics(tmp_path)[-1]


def test_the_average_is_evaluated_without_changing_the_training(tmp_path, capsys):
    trainers = [small_trainer(tmp_path / "ema", *EMA), small_trainer(tmp_path / "plain", EMA[1])]
    for trainer in trainers:
        trainer.run()
    assert_same(*map(weights, trainers))
    output, trainer = capsys.readouterr().out, trainers[0]
    lines, theirs = (timeless(tmp_path / run) for run in ("ema", "plain"))
    extra = {"ema_loss", "ema_top1", "ema_top5"}
    assert [{k: v for k, v in line.items() if k not in extra} for line in lines] == theirs
    val = [line for line in lines if line["split"] == "val"]
    assert len(val) == 2
    assert all(extra < line.keys() for line in val)
    # The exported weights have the loss that was logged.
    trainer.model.load_state_dict(torch.load(tmp_path / "ema" / "weights_ema.pt"))
    trainer.model.eval()
    with torch.no_grad():
        batches = ((trainer.model(images), labels) for images, labels in trainer.val_loader)
        losses = [F.cross_entropy(*batch, reduction="sum") for batch in batches]
    last, summary = val[-1], json.loads((tmp_path / "ema" / "summary.json").read_text())
    assert sum(losses).item() / 8 == pytest.approx(last["ema_loss"], rel=1e-5)
    assert last["ema_loss"] != pytest.approx(last["loss"], rel=1e-4)
    found = [summary[name] for name in ("ema_top1", "ema_top5", "ema_val_loss")]
    assert found == [last[name] for name in ("ema_top1", "ema_top5", "ema_loss")]
    assert f"  EMA {last['ema_top1']:6.2f}%  evaluated in " in output
    assert "\n  EMA top-1 " in output
    assert not (tmp_path / "plain" / "weights_ema.pt").exists()


@pytest.mark.parametrize(("own", "average", "steps"), [(49.0, 51.0, 8), (51.0, 49.0, 1)])
def test_target_accuracy_applies_to_the_weights_not_to_their_average(
    tmp_path, monkeypatch, own, average, steps
):
    for module, top1 in (("trainer", own), ("evaluate", average)):
        values = {"loss": 1.0, "top1": top1, "top5": 100.0}
        path = f"largebatch.recipes.training.{module}.evaluate"
        monkeypatch.setattr(path, lambda *a, values=values: dict(values))
    trainer = small_trainer(tmp_path, *EMA, "target_accuracy=50", "evaluate_every=1")
    trainer.run()
    assert trainer.step == steps


def test_averaging_may_be_switched_on_or_off_on_resume(tmp_path, capsys):
    small_trainer(tmp_path / "a", EMA[1], "stop_after=3").run()
    late = small_trainer(tmp_path / "a", *EMA, "resume=true")
    assert "ema.decay is now 0.6, was null" in capsys.readouterr().out
    assert late.ema.updates == 0
    assert_same(late.ema.parameters, {n: p.detach() for n, p in late.model.named_parameters()})
    late.run()
    assert late.ema.updates == 5
    assert small_trainer(tmp_path / "a", EMA[1], "resume=true", "epochs=3").ema is None


def on_ranks(folder):
    with small_networks():
        keys = [*EMA, "micro_batch_size=3"]
        whole = small_trainer(folder / "whole", *keys)
        seen = follow(whole)
        own = {n: whole.ema.buffers[n].clone() for n in whole.ema.buffers}
        small_trainer(folder / "part", *keys, "stop_after=4").run()
        small_trainer(folder / "part", *keys, "resume=true").run()
    return by_hand([{n: v[n] for n in own} for v in seen], 0.6), own


def test_each_rank_averages_its_statistics_and_files_hold_their_mean(tmp_path):
    (first, own), (second, others) = run_ranks(2, on_ranks, tmp_path)
    exported = torch.load(tmp_path / "whole" / "weights_ema.pt")
    assert_same(torch.load(tmp_path / "part" / "weights_ema.pt"), exported)
    assert any(not torch.equal(own[n], others[n]) for n in own)
    # On another number of ranks, statistics continue from their mean.
    keys = [*EMA, "resume=true", "resume.reshard=true", "epochs=3"]
    alone = small_trainer(tmp_path / "whole", *keys)
    for name in own:
        mean = (first[name] + second[name]) / 2
        torch.testing.assert_close(exported[name].double(), mean, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(alone.ema.buffers[name], exported[name])
