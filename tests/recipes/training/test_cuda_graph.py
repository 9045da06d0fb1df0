"""Steps that are replayed from graphs, on a model of CUDA graphs for the CPU."""

import pytest
import torch

from largebatch.lars import LARS
from largebatch.pipeline import Batch
from largebatch.recipes.errors import RecipeError, TrainingError
from largebatch.recipes.training import cuda_graph
from largebatch.recipes.training.metrics import read_metrics
from tests.host_reads import NoHostReads
from tests.recipes.runs import assert_same, largest_difference, weights
from tests.recipes.training.recorded_graph import recorded_graphs
from tests.recipes.training.small import small, small_trainer

__all__ = ["small"]  # a fixture
pytestmark = [
    pytest.mark.slow("trains with graphs and as usual in each form of precision"),
    pytest.mark.usefixtures("small"),
]

CAPTURED = "cuda_graph: from here on, steps are replayed from CUDA graphs"
#: Relative difference of weights by the rounding of a learning rate that is a tensor, in 12 steps.
ROUNDING = 1e-4


@pytest.fixture(autouse=True)
def graphs():
    with recorded_graphs() as recorded:
        yield recorded


def _differs(key):
    """Whether a metric differs from run to run."""
    return key.endswith(("seconds", "per_second")) or key == "memory_bytes"


def run(run_dir, *keys, graph="auto", change=lambda trainer: None):
    """Train, and return all that a run leaves: weights, metrics, and the lines that it showed."""
    trainer = small_trainer(run_dir, *keys, f"cuda_graph={graph}")
    lines = []
    trainer.display.say = lines.append
    trainer.display.warn = lambda line: lines.append(f"warning: {line}")
    ratios = {}
    trainer.callbacks.histograms = lambda _, step, __, values: ratios.update(
        {f"ratios.{step}.{name}": value for name, value in values.items()}
    )
    change(trainer)
    trainer.run()
    left = weights(trainer) | ratios
    for index, state in trainer.optimizer.state_dict()["state"].items():
        left |= {f"{index}.{key}": value.clone() for key, value in state.items()}
    if trainer.ema:
        left |= {f"ema.{name}": value for name, value in trainer.ema.parameters.items()}
    metrics = [{k: v for k, v in x.items() if not _differs(k)} for x in read_metrics(run_dir)]
    return left, metrics, lines


def assert_same_runs(ours, theirs):
    assert largest_difference(ours[0], theirs[0]) < ROUNDING
    assert len(ours[1]) == len(theirs[1])
    for line, other in zip(ours[1], theirs[1], strict=True):
        assert line.pop("split") == other.pop("split")
        assert line == pytest.approx(other, rel=1e-4, nan_ok=True)


EVERYTHING = [
    *("optimizer.clip_grad_norm=0.5", "ema.decay=0.9", "ema.every=2", "trust_ratios_every=1ep"),
    "optimizer.weight_decay=0.01",
]
CASES = {
    "three micro-batches": EVERYTHING,
    "one micro-batch": [*EVERYTHING, "micro_batch_size=12"],
    "mlperf-corrected": [*EVERYTHING, "optimizer.dialect=mlperf-corrected"],
    "torch": ["optimizer.dialect=torch", "optimizer.bias_lr_scale=0.5"],
    "larc": ["optimizer.dialect=larc"],
    "simclr-popular": ["optimizer.dialect=simclr-popular"],
    "nesterov": ["optimizer.nesterov=true", "schedule.warmup=0"],
    "muon": [
        *(*EVERYTHING, "model.args={hidden: 8}", "optimizer.name=muon", "optimizer.nesterov=true"),
        "optimizer.args={adjust_lr_fn: trust_ratio, others: {rule: adamw, lr_scale: 0.1}}",
    ],
    "muon in fp16-master": [
        *("precision=fp16-master", "model.args={hidden: 8}", "optimizer.name=muon"),
        # LARS and SGD would run in the kernel of the CPU, which is not captured.
        "optimizer.args={norm_projection: true, others: {rule: adamw}}",
    ],
    "bf16": [*EVERYTHING, "precision=bf16"],
    "bf16-master": [*EVERYTHING, "precision=bf16-master", "micro_batch_size=12"],
    "fp16": ["precision=fp16", "micro_batch_size=12"],
    "fp16-master": [*EVERYTHING, "precision=fp16-master"],
    "a static loss scale": ["precision=fp16-master", "loss_scale=64"],
    "slices": ["batch_norm.over=ghost", "batch_norm.images=2"],
    "channels_last": ["channels_last=true"],
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_are_the_steps_as_usual(tmp_path, graphs, case):
    theirs = run(tmp_path / "eager", *CASES[case], graph="false")
    ours = run(tmp_path / "graphs", *CASES[case])
    assert ours[2].count(CAPTURED) == 1
    assert graphs.captures == (2 if "micro_batch_size=12" in CASES[case] else 3)
    assert_same_runs(ours, theirs)


@pytest.mark.parametrize("micro_batch", [4, 12])
@pytest.mark.parametrize("precision", ["fp16", "fp16-master"])
@pytest.mark.parametrize("spikes", [(3, 7, 8), (6,)], ids=["also at the capture", "later"])
def test_a_replayed_step_that_overflows_changes_nothing(tmp_path, micro_batch, precision, spikes):
    """A step that overflows cannot be checked, so that the next one is captured instead."""

    def overflows(trainer):
        update = trainer._update

        def spiked(*arguments):
            scale = trainer.precision._scaler._scaler._scale
            if scale is not None:
                scale.fill_(2.0**40 if trainer.step in spikes else 1024.0)
            before = weights(trainer)
            update(*arguments)
            if trainer.step in spikes:
                assert_same(weights(trainer), before)

        trainer._update = spiked

    keys = [f"precision={precision}", f"micro_batch_size={micro_batch}", "log_every=1"]
    theirs = run(tmp_path / "eager", *keys, graph="false", change=overflows)
    ours = run(tmp_path / "graphs", *keys, change=overflows)
    assert_same_runs(ours, theirs)
    assert ours[2].count(CAPTURED) == 1


def test_replayed_steps_that_all_overflow_stop_the_run_at_the_meters(tmp_path):
    def overflows(trainer):
        update = trainer._update

        def spiked(*arguments):
            if trainer.step >= 4:
                trainer.precision._scaler._scaler._scale.fill_(2.0**40)
            update(*arguments)

        trainer._update = spiked

    keys = ["precision=fp16-master", "max_skipped_steps=3", "micro_batch_size=12", "log_every=8"]
    line = r"4 steps in a row were skipped: .*affected, from the loss backwards: .* at step 8 of 8"
    with pytest.raises(TrainingError, match=line):
        run(tmp_path, *keys, "evaluate_every=null", change=overflows)


def test_an_option_that_changes_is_captured_again(tmp_path, graphs):
    def decays(trainer):
        update = trainer._update

        def changed(*arguments):
            if trainer.step == 4:
                for group in trainer.optimizer.param_groups:
                    group["weight_decay"] = 5.0
            update(*arguments)

        trainer._update = changed

    theirs = run(tmp_path / "eager", "optimizer.weight_decay=0.01", graph="false", change=decays)
    ours = run(tmp_path / "graphs", "optimizer.weight_decay=0.01", change=decays)
    assert ours[2].count(CAPTURED) == 2
    assert_same_runs(ours, theirs)


def test_stages_are_captured_again(tmp_path, graphs):
    """Another image size, then another number of micro-batches, then another size of them."""
    keys = ["epochs=6", "evaluate_every=null", "trust_ratios_every=1ep"]
    stages = [
        "{from: 1.5ep, image_size: 8}",
        "{from: 3ep, batch_size: 8, micro_batch_size: 4, lr: keep}",
        "{from: 4.5ep, batch_size: 8, micro_batch_size: 8, lr: linear}",
    ]
    keys.append(f"stages=[{', '.join(stages)}]")
    theirs = run(tmp_path / "eager", *keys, graph="false")
    ours = run(tmp_path / "graphs", *keys)
    assert ours[2].count(CAPTURED) == 4
    assert graphs.captures == 3 + 3 + 3 + 2
    assert_same_runs(ours, theirs)


@pytest.mark.parametrize(
    ("before", "after"), [("auto", "auto"), ("auto", "false"), ("false", "auto")]
)
def test_a_run_resumes_with_and_without_graphs(tmp_path, before, after):
    keys = ["precision=bf16-master", "ema.decay=0.9", "epochs=3", "optimizer.bias_lr_scale=0.5"]
    whole = run(tmp_path / "whole", *keys, graph="false")
    run(tmp_path / "part", *keys, "stop_after=6", graph=before)
    resumed = run(tmp_path / "part", *keys, "resume=true", graph=after)
    assert (CAPTURED in resumed[2]) == (after == "auto")
    ends = [[x for x in metrics if x["step"] > 6] for _, metrics, _ in (resumed, whole)]
    assert_same_runs((resumed[0], ends[0]), (whole[0], ends[1]))


def test_a_capture_changes_nothing_and_loses_no_batch(tmp_path):
    """Neither weights, statistics, the optimizer, the loss scale nor random numbers."""
    trainer = small_trainer(tmp_path, "precision=fp16-master", "cuda_graph=auto")
    graphed, batches = trainer._take_step, iter(trainer.loader)
    captured = graphed._captured
    seen = []

    def everything():
        optimizer = trainer.optimizer
        tensors = [t for state in optimizer.state.values() for t in state.values()]
        scaler = trainer.precision._scaler._scaler
        tensors += [scaler._scale, scaler._growth_tracker, torch.get_rng_state()]
        return [t.clone() for t in (*trainer.model.state_dict().values(), *tensors)]

    def watched(*arguments):
        before = everything()
        graphs = captured(*arguments)
        assert all(map(torch.equal, before, everything()))
        assert all(p.grad is None for p in trainer.model.parameters())
        seen.append(graphs)
        return graphs

    graphed._captured = watched
    meter = cuda_graph.Meter(trainer.job.device)
    for _ in range(5):
        trainer._update(batches, meter)
        trainer.step += 1
    assert len(seen) == 1
    assert seen[0] is not None
    assert trainer.loader._position == 5 * 12
    assert meter.read(trainer.job)[1] == 5 * 12


def test_replays_read_and_write_the_same_memory_and_never_wait(tmp_path):
    trainer = small_trainer(tmp_path, *EVERYTHING, "cuda_graph=auto")
    batches, meter = iter(trainer.loader), cuda_graph.Meter(trainer.job.device)

    def addresses():
        graphs = trainer._take_step._graphs
        tensors = [*graphs.inputs, *graphs.first.outputs, *graphs.other.outputs, *graphs.gradients]
        tensors += [*trainer.model.state_dict().values(), graphs.update.outputs]
        tensors += [t for state in trainer.optimizer.state.values() for t in state.values()]
        tensors += [group["lr"] for group in trainer.optimizer.param_groups]
        return [tensor.data_ptr() for tensor in tensors]

    def step():
        trainer._update(batches, meter)
        trainer.step += 1

    for _ in range(4):
        step()
    first = addresses()
    given = set()
    for _ in range(4):
        with NoHostReads():
            step()
        assert addresses() == first
        given.add(trainer._take_step._graphs.inputs.images.sum().item())
    assert len(given) == 4


# --- graphs that are wrong, or cannot be ------------------------------------------------------


def test_a_rate_that_is_a_number_would_be_found(tmp_path, monkeypatch):
    """These tests notice what a graph keeps from its capture."""
    theirs = run(tmp_path / "eager", graph="false")
    monkeypatch.setattr(cuda_graph, "put_rates_on_device", lambda optimizer, device: None)
    monkeypatch.setattr(cuda_graph, "options_of", lambda optimizer: None)
    ours = run(tmp_path / "graphs")
    assert CAPTURED in ours[2]
    assert largest_difference(ours[0], theirs[0]) > 100 * ROUNDING


FAULTS = {
    "old images": lambda graphs: graphs._replace(
        inputs=Batch(*(tensor.clone() for tensor in graphs.inputs))
    ),
    "a micro-batch that overwrites the others": lambda graphs: graphs._replace(other=graphs.first),
    "nothing is replayed": lambda graphs: graphs._replace(
        first=graphs.first._replace(replay=lambda: None)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_graph_is_not_used(tmp_path, monkeypatch, fault):
    theirs = run(tmp_path / "eager", graph="false")
    capture = cuda_graph._capture
    monkeypatch.setattr(
        cuda_graph, "_capture", lambda *arguments: FAULTS[fault](capture(*arguments))
    )
    ours = run(tmp_path / "graphs")
    line = (
        "warning: cuda_graph: not used: a replayed step does not compute the gradients of the step"
    )
    assert [text.startswith(line) for text in ours[2] if "cuda_graph" in text] == [True]
    assert_same_runs(ours, theirs)


class Reading(LARS):
    """Reads on the host."""

    def step(self, closure=None):
        if self.param_groups[0]["params"][0].grad.sum() > 1e9:
            return None
        return super().step(closure)


class Refusing(LARS):
    """Takes no rate that is a tensor."""

    def step(self, closure=None):
        if any(isinstance(group["lr"], torch.Tensor) for group in self.param_groups):
            raise TypeError("lr must be a number")
        return super().step(closure)


class Counting(LARS):
    """Counts its steps on the host."""

    def step(self, closure=None):
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        return super().step(closure)


class Replacing(LARS):
    """Makes its state anew in each step."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].clone()


class Hooked(LARS):
    """Has a hook of its steps."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.register_step_post_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        ("Reading", "AssertionError: _local_scalar_dense"),
        ("Refusing", "TypeError: lr must be a number"),
        ("Counting", "RuntimeError: the optimizer changes its 'steps' outside of the device"),
        ("Replacing", "the optimizer changes its 'momentum_buffer' outside of the device"),
        ("Hooked", "RuntimeError: the optimizer has hooks, which a replay does not call"),
    ],
)
@pytest.mark.parametrize("micro_batch", [4, 12])
def test_what_cannot_be_captured_runs_as_usual(tmp_path, optimizer, reason, micro_batch):
    name = f"{__name__}:{optimizer}"
    keys = [f"optimizer.name={name}", f"micro_batch_size={micro_batch}", "ema.decay=0.9"]
    theirs = run(tmp_path / "eager", *keys, graph="false")
    ours = run(tmp_path / "graphs", *keys)
    assert [reason in text for text in ours[2] if "cuda_graph" in text] == [True]
    assert_same_runs(ours, theirs)
    with pytest.raises(RecipeError, match=r"cuda_graph: true, but a step cannot .*; valid: auto"):
        run(tmp_path / "required", *keys, graph="true")


def test_compilation_makes_no_graphs_inside_of_graphs(tmp_path, monkeypatch):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda f, *, mode: modes.append(mode) or f)
    for mode in ("true", "reduce-overhead", "max-autotune"):
        small_trainer(tmp_path, f"compile={mode}", "cuda_graph=auto")
        small_trainer(tmp_path, f"compile={mode}", "cuda_graph=auto", "optimizer.name=sgd")
    assert modes[::2] == modes[1::2]  # of the model, for evaluation, and of forward and loss
    assert modes[::4] == ["default", "default", "max-autotune-no-cudagraphs"]
    assert modes[2::4] == ["default", "reduce-overhead", "max-autotune"]
