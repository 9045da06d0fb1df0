"""Save and resume in plain torch and Lightning.

A run of six updates equals three updates, a checkpoint, everything built anew from other random
weights, the checkpoint loaded, and three more updates: weights and learning rates, bit for bit.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from largebatch.amp import Precision
from largebatch.lars import LARS, as_scheduler, polynomial, split_parameters

STEPS, HALF, BATCH = 6, 3, 8


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, so that sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        first = nn.Linear(6, 12, bias=False)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, images, labels):
        return cross_entropy(self.layers(images).float(), labels)


def loader():
    """Return one epoch of batches in a fixed order: half of a run."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(HALF * BATCH, 6, generator=generator)
    labels = (images[:, 0] > 0).long() + (images[:, 1] > 1).long()
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH)


def prepared(model, rates, **options):
    """Return LARS with a lower rate for biases and norms, which notes its rates, and its schedule.

    Nesterov momentum, decay and a warm-up that ends after the checkpoint make every part of the
    state matter.
    """
    groups = split_parameters(model, weight_decay=1e-2)
    groups[1]["lr"] = 0.05
    optimizer = LARS(groups, lr=0.5, trust_coefficient=0.1, nesterov=True, **options)
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append([group["lr"] for group in optimizer.param_groups])
    )
    schedule = polynomial(0.5, STEPS, warmup_steps=HALF + 1, start=0.1, end=0.01)
    return optimizer, as_scheduler(optimizer, schedule)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16-master"])
def test_plain_torch(tmp_path, name):
    def run(*, stops, resumes):
        rates, file = [], tmp_path / "checkpoint.pt"
        precision = Precision(name)
        model = precision.convert(Net())
        optimizer, scheduler = prepared(model, rates, master_weights=name.endswith("master"))
        parts = (model, optimizer, scheduler, precision)
        done = 0
        if resumes:
            done = HALF
            for part, state in zip(parts, torch.load(file, weights_only=True), strict=True):
                part.load_state_dict(state)
        batches = [*loader(), *loader()]
        for images, labels in batches[done : HALF if stops else STEPS]:
            with precision.forward():
                loss = model(images, labels)
            precision.backward(loss)
            precision.step(optimizer)
            scheduler.step()
            optimizer.zero_grad()
        if stops:
            torch.save([part.state_dict() for part in parts], file)
        return weights(model), rates

    torch.manual_seed(1)
    expected, rates = run(stops=False, resumes=False)
    assert len(rates) == STEPS
    assert all(bias == pytest.approx(0.1 * weight) for weight, bias in rates)
    assert len({weight for weight, _ in rates}) == STEPS
    torch.manual_seed(1)
    first, before = run(stops=True, resumes=False)
    torch.manual_seed(2)  # other weights, which loading must replace
    found, after = run(stops=False, resumes=True)
    assert before + after == rates
    assert len(before) == HALF
    moved = {name for name in expected if not torch.equal(first[name], expected[name])}
    assert moved == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow("imports Lightning")
@pytest.mark.parametrize("stops_after", [1, 2])
def test_layers_that_lightning_unfreezes_keep_a_tenth_of_the_rate(tmp_path, stops_after):
    """Three epochs, with the first layer unfrozen in the second, whole and in two parts."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net.layers[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch >= 1:  # a resumed run must unfreeze the layer again
                self.unfreeze_and_add_param_group(module.net.layers[0], optimizer)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.rates = Net(), []

        def training_step(self, batch, index):
            return self.net(*batch)

        def configure_optimizers(self):
            optimizer, scheduler = prepared(self.net, self.rates)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def run(folder, epochs, resumes=False):
        module = Module()
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        options = {"accelerator": "cpu", "default_root_dir": folder, "callbacks": [Unfreeze()]}
        trainer = lightning.Trainer(max_epochs=epochs, **options, **quiet)
        saved = next((folder / "checkpoints").glob("*.ckpt")) if resumes else None
        trainer.fit(module, loader(), ckpt_path=saved)
        return weights(module.net), module.rates

    torch.manual_seed(1)
    expected, rates = run(tmp_path / "whole", 3)
    assert [len(of_step) for of_step in rates] == [2] * HALF + [3] * 2 * HALF
    for of_step in rates[HALF:]:
        assert of_step[2] == pytest.approx(of_step[0] / 10)
    torch.manual_seed(1)
    _, before = run(tmp_path / "part", stops_after)
    found, after = run(tmp_path / "part", 3, resumes=True)
    assert before + after == rates
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
