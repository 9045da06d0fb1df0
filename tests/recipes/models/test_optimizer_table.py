"""Every optimizer of the table: groups, masters, overflow, schedule and checkpoints."""

import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from largebatch.amp import MasterWeights, Precision
from largebatch.lars import LARS, Muon, as_scheduler, polynomial
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.models.optimizers import build_optimizer, in_words, place_state, share_work
from largebatch.recipes.schema.load import load
from largebatch.recipes.schema.optimizers import OPTIMIZERS
from largebatch.recipes.training.folder import checkpoint
from largebatch.recipes.training.folder.saving import Checkpoints
from tests.recipes.runs import JOB, assert_same

#: Keys with which each takes other steps than by default; the rates of groups differ.
KEYS = {
    "lars": ["momentum=0.8", "dialect=mlperf-corrected"],
    "sgd": ["momentum=0.8", "nesterov=true"],
    "lamb": ["args={betas: [0.8, 0.9]}"],
    "adamw": ["args={betas: [0.8, 0.9]}"],
    "muon": [
        *("momentum=0.8", "nesterov=true"),
        "args={norm_projection: true, others: {rule: sgd, lr_scale: 1.5}}",
    ],
    "Adafactor": [],
    "timm.optim:Adan": [],
    f"{__name__}:Counting": [],
}
STEPS = 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)
    )


def recipe(name, *keys):
    keys = ("lr=0.02", "weight_decay=0.1", "bias_lr_scale=0.5", *KEYS.get(name, []), *keys)
    own = [f"optimizer.{key}" for key in (f"name={name}", *keys)]
    return load("digits", [*own, "precision=fp32"]).recipe


class Run:
    """A few steps of a network by the optimizer of a recipe, as the trainer takes them."""

    def __init__(self, of, precision):
        self.model = net()
        named = of.model_copy(update={"precision": precision})
        self.optimizer = build_optimizer(named, self.model)
        self.amp = Precision(precision, loss_scale=128.0 if "fp16" in precision else "none")
        self.model = self.amp.convert(self.model)
        place_state(self.optimizer)
        self.schedule = polynomial(of.optimizer.lr, STEPS + 1, warmup_steps=2, start=0.01)
        self.done = 0

    def saved(self, folder):
        about = {"loader": {}, "precision": {}, "recipe": {}}
        return Checkpoints(folder, JOB).write(self.done, self.model, self.optimizer, about)

    def resume(self, path):
        checkpoint.load(path, self.model, self.optimizer, JOB)
        self.done = 2

    def train(self, steps, of=lambda loss: loss):
        scheduler = as_scheduler(self.optimizer, self.schedule, steps_done=self.done)
        for step in range(self.done, self.done + steps):
            torch.manual_seed(step)
            with self.amp.forward():
                loss = self.model(torch.randn(5, 3)).square().sum()
            self.amp.backward(of(loss))
            self.amp.step(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            self.done += 1
        return self

    def tensors(self):
        found = {f"model.{k}": v.detach().clone() for k, v in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            content = {k: torch.as_tensor(v).clone() for k, v in state.items() if v is not None}
            found |= {f"{index}.{key}": value for key, value in content.items()}
        return found


@pytest.mark.parametrize("precision", ["fp32", "bf16-master"])
@pytest.mark.parametrize("name", KEYS)
def test_an_optimizer_resumes_bit_for_bit_with_its_groups_rates_and_masters(
    tmp_path, name, precision
):
    of = recipe(name)
    run = Run(of, precision).train(2)
    expected = {}
    for group in run.optimizer.param_groups:
        biases = {p.ndim for p in group["params"]} == {1}
        assert biases or {p.ndim for p in group["params"]} == {2}
        assert group["weight_decay"] == (0 if biases else 0.1)
        rate = 0.03 if group.get("orthogonal") is False else 0.02
        expected[id(group)] = rate * (0.5 if biases else 1) / 0.02
    again = Run(of, precision)
    again.resume(run.saved(tmp_path))
    assert_same(again.train(STEPS - 2).tensors(), run.train(STEPS - 2).tensors())
    for group in run.optimizer.param_groups:  # the ratio of the rates is kept to the end
        assert float(group["lr"]) == pytest.approx(expected[id(group)] * run.schedule(STEPS))
    masters = [s for s in run.optimizer.state.values() if "master" in s]
    assert len(masters) == (0 if precision == "fp32" else 6)
    assert all(state["master"].dtype == torch.float32 for state in masters)
    for old, new in zip(net().parameters(), run.model.parameters(), strict=True):
        assert (old != new).any()


@pytest.mark.parametrize(
    ("name", "precision"),
    [*product(KEYS, ["fp16", "fp16-master"]), ("lars", "fp16-pure"), ("muon", "fp16-pure")],
)
def test_a_step_that_overflows_changes_nothing(name, precision):
    run = Run(recipe(name), precision).train(1)
    before = run.tensors()
    assert_same(run.train(1, of=lambda loss: loss * float("inf")).tensors(), before)
    after = run.train(1).tensors()
    assert not torch.equal(after["model.3.weight"], before["model.3.weight"])


def test_entries_say_what_their_optimizers_do():
    kinds = {"lars": LARS, "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "muon": Muon}
    for name, entry in OPTIMIZERS.items():
        optimizer = build_optimizer(recipe(name), net())
        assert type(optimizer).__name__ == kinds.get(name, type(optimizer)).__name__
        assert entry.masters == getattr(optimizer, "_step_supports_amp_scaling", False)
        assert entry.masters == hasattr(type(optimizer), "master_weights")
        assert bool(entry.trust_ratios) == hasattr(optimizer, "trust_ratios")
    assert {*OPTIMIZERS} <= {*KEYS}


def test_muon_orthogonalizes_hidden_weights_and_gives_the_others_their_rule():
    of = recipe("muon", "args.ns_dtype=float64", "args.others.rule=adamw")
    optimizer = build_optimizer(of, net())
    (hidden,) = (group for group in optimizer.param_groups if group["orthogonal"])
    assert [p.shape for p in hidden["params"]] == [(6, 8)]
    assert (hidden["lr"], hidden["ns_dtype"], hidden["momentum"]) == (0.02, torch.float64, 0.8)
    assert {group["rule"] for group in optimizer.param_groups if group is not hidden} == {"adamw"}
    assert in_words(of, optimizer) == ("muon", "adamw on 58.6 % of the parameters")
    with pytest.raises(RecipeError, match=r"^optimizer\.name: \w+ has no weights for muon: hidden"):
        build_optimizer(of, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("args.norm_projecton=true", "did you mean 'norm_projection'? Valid: adjust_lr_fn, "),
        ("args.momentum=0.5", "args.momentum: set by optimizer.momentum; valid: leave it out"),
        ("args.share=some", "args.share: must be true or false, not 'some'"),
        ("args.ns_dtype=float23", "args.ns_dtype: no dtype 'float23'; did you mean 'float32'? "),
        ("args.others=3", "args.others: must be a mapping, not 3; valid: such as {rule: sgd, lr_s"),
        ("args.others.lr=1", "args.others.lr: set by optimizer.lr and optimizer.args.others.lr_"),
        ("args.others.lr_scale=null", "args.others.lr_scale: must be a number >= 0, not None"),
        ("args.others.momentum=high", "args: others: momentum must be in [0, 1), not 'high'"),
        ("args.conv_mode=deep", "args: conv_mode must be one of flatten, batched, not 'deep'"),
    ],
)
def test_what_muon_does_not_take_is_refused_by_its_key(key, message):
    with pytest.raises(RecipeError) as caught:
        build_optimizer(recipe("muon", key), net())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "what largebatch.lars.Muon takes" not in str(caught.value)


def with_others(groups, lr, others):
    return torch.optim.SGD(groups, lr)


def test_an_argument_others_of_a_users_factory_is_the_users():
    of = recipe(f"{__name__}:with_others", "args={others: [1, 2]}")
    assert type(build_optimizer(of, net())) is torch.optim.SGD


class Counting(torch.optim.Optimizer):
    """Counts steps in its groups, as numbers, and holds a tensor: as apex's fused optimizers do."""

    def __init__(self, params, lr=1e-3, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.flag = torch.zeros(1)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                average.lerp_(p.grad, 0.5)
                p.sub_(group["lr"] * average / (1 - 0.5 ** group["step"]))


def test_tensors_that_an_optimizer_holds_follow_its_parameters():
    model = nn.Linear(2, 2)
    optimizer = MasterWeights(Counting(model.parameters()))
    optimizer._inner.param_groups[0]["params"] = [nn.Parameter(torch.empty(2, device="meta"))]
    place_state(optimizer)
    assert optimizer._inner.flag.device.type == "meta"


@pytest.mark.parametrize(
    ("name", "keys", "ranks", "shared"),
    [
        ("muon", [], 4, True),
        ("muon", ["args.share=false"], 2, False),
        ("muon", [], 1, False),
        ("lars", [], 2, False),
    ],
)
def test_the_ranks_of_a_node_share_what_muon_orthogonalizes(name, keys, ranks, shared):
    of_node = object()
    topology = SimpleNamespace(world_size=ranks, groups=SimpleNamespace(intra=of_node))
    optimizer = SimpleNamespace(process_group=None)
    share_work(recipe(name, *keys), optimizer, topology)
    assert optimizer.process_group is (of_node if shared else None)


def test_a_missing_package_is_named_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(
        RecipeError, match=r"^optimizer\.name: lamb needs timm\.optim, which is not"
    ):
        build_optimizer(recipe("lamb"), net())


def test_muons_trust_ratios_are_recorded_only_where_it_has_them():
    keys = ["optimizer.name=muon", "trust_ratios_every=1ep"]
    with pytest.raises(RecipeError, match="trust_ratios_every: muon has no trust ratios with"):
        load("digits", keys)
    assert load("digits", [*keys, "optimizer.args={adjust_lr_fn: trust_ratio}"])
    assert load("digits", [*keys, "optimizer.args={others: {rule: lars}}"])
