"""Every implementation against the reference, and the dialects against SGD and one another."""

from itertools import cycle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.lars import DENOMINATORS, DIALECTS, LARS, polynomial
from tests.lars.problems import ADAPT, FAST, FORMS, LAYOUTS, OPTIONS, assert_close, laid_out, train


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.filterwarnings("ignore:.*encountered in divide")  # by Triton's interpreter
@settings(deadline=None, max_examples=25)
@given(
    *(OPTIONS, st.sampled_from(sorted(DIALECTS)), ADAPT, st.booleans()),
    *(st.sampled_from([1e-12, 1.0, 1e12]), st.booleans(), st.booleans()),
    *(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
)
def test_implementation_matches_the_reference(
    implementation,
    options,
    dialect,
    adapt,
    adapt_first,
    gradient_scale,
    tensor_lr,
    masked,
    of_weights,
    of_gradients,
):
    """Over a warm-up from 0 and a decay, in two groups, on tensors of 0 to 4 dimensions."""
    assume((implementation, dialect) in FORMS)
    steps = 3 if implementation == "triton" else 6  # whose interpreter is slow
    schedule = polynomial(3.0, steps, warmup_steps=steps // 3, end=0.01)
    if tensor_lr:
        rate = schedule
        schedule = lambda step: torch.tensor(rate(step), dtype=torch.float64)  # noqa: E731

    def run(implementation):
        def make(parameters):
            groups = [
                {"params": parameters[:2], "weight_decay": 0.0, "adapt": adapt_first},
                {"params": parameters[2:]},
            ]
            form = {"dialect": dialect, "adapt": adapt, "implementation": implementation}
            return LARS(groups, 3.0, **form, **options)

        def edit_weights(parameters):
            for parameter in parameters:
                parameter.data = laid_out(parameter.data, of_weights)
            if masked:
                parameters[2].data.zero_()

        def edit_gradients(step, parameters):
            for parameter in parameters:
                parameter.grad = laid_out(parameter.grad, of_gradients)
            if masked and step % 2:
                parameters[3].grad.zero_()

        edits = {"edit": edit_weights, "edit_gradients": edit_gradients}
        return train(make, steps, schedule=schedule, gradient_scale=gradient_scale, **edits)

    assert_close(run(implementation), run("reference"))


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("decay_at_zero_norm", [True, False])
@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_zero_weights_and_zero_gradients_take_the_plain_rate(
    denominator, decay_at_zero_norm, dialect
):
    """A zero gradient is no zero norm where the norm is of the decayed gradient or the momentum."""
    weights = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    gradients = [torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    parameters = [nn.Parameter(w.clone()) for w in weights]
    form = {"denominator": denominator, "decay_at_zero_norm": decay_at_zero_norm, "adapt": True}
    options = {"dialect": dialect, "implementation": "reference", **form}
    optimizer = LARS(parameters, 0.5, weight_decay=0.1, **options)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    ratio, decay = 1.0, 0.1
    if denominator == "norm-of-sum" or dialect == "simclr-popular":
        ratio = 1e-3 / decay
        if dialect == "larc":
            ratio = ratio / 0.5
    elif dialect == "larc" or not decay_at_zero_norm:
        decay = 0.0
    torch.testing.assert_close(parameters[0].detach(), weights[0] - 0.5 * gradients[0])
    torch.testing.assert_close(parameters[1].detach(), weights[1] * (1 - 0.5 * ratio * decay))
    assert list(optimizer.trust_ratios().values()) == pytest.approx([1.0, ratio], rel=1e-12)


SCHEDULE = polynomial(2.0, 12, warmup_steps=4, start=0.1)


@pytest.mark.parametrize(
    ("form", "momentum", "nesterov"),
    [(f, *m) for f, m in zip(FORMS, cycle([(0.0, False), (0.9, False), (0.9, True)]))],
)
def test_without_adaptation_lars_matches_torchs_sgd(form, momentum, nesterov):
    """The dialect mlperf at a constant rate, where it does not matter whether the buffer has it."""
    implementation, dialect = form
    shared = {"momentum": momentum, "weight_decay": 1e-2, "nesterov": nesterov, "maximize": True}
    schedule = None if dialect == "mlperf" else polynomial(0.2, 3, warmup_steps=1, start=0.1)
    theirs = train(lambda p: torch.optim.SGD(p, 0.1, **shared), steps=3, schedule=schedule)
    options = {"dialect": dialect, "implementation": implementation, "adapt": False}
    ours = train(lambda p: LARS(p, 0.1, **options, **shared), steps=3, schedule=schedule)
    assert_close(ours, theirs)


def test_momentum_correction_makes_mlperf_match_dialect_torch():
    """NVIDIA's momentum correction rescales the buffer to the current learning rate."""
    corrected = train(lambda p: LARS(p, 1.0, dialect="mlperf-corrected"), schedule=SCHEDULE)
    outside = train(lambda p: LARS(p, 1.0, dialect="torch"), schedule=SCHEDULE)
    assert_close(corrected, outside)
