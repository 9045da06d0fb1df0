"""Schedules have the values of their formulas at each step, and spans those of their text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.lars import WARMUP_SHAPES, Span, constant, cosine, polynomial, step_decay, warmup

lengths = st.integers(1, 5000)
runs = st.integers(1, 5000).flatmap(
    lambda total: st.tuples(st.just(total), st.integers(0, total), st.integers(0, total - 1))
)


@given(runs, st.floats(0.5, 4), st.floats(0.01, 50), st.none() | lengths)
def test_polynomial_matches_its_formula(run, power, peak, decay):
    """A decay that ends early stays at its end."""
    total, warmup, step = run
    options = {"warmup_steps": warmup, "decay_steps": decay, "power": power}
    schedule = polynomial(peak, total, **options, end=1e-4)
    if step < warmup:
        expected = peak * step / warmup
    else:
        done = min(1, (step - warmup) / (decay or total - warmup))
        expected = 1e-4 + (peak - 1e-4) * (1 - done) ** power
    assert schedule(step) == pytest.approx(expected, rel=1e-12)


peaks = st.floats(0.01, 50)


@given(lengths, peaks, st.floats(0, 0.01), st.floats(0, 1.5))
def test_cosine_matches_its_formula(steps, peak, end, share):
    schedule = cosine(peak, steps, end=end)
    step = int(share * steps)
    # The half-angle form, which differs from the one in the code.
    expected = end + (peak - end) * math.cos(math.pi / 2 * min(1, step / steps)) ** 2
    assert schedule(step) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert schedule(step) >= schedule(step + 1)
    assert schedule(0) == pytest.approx(peak)
    assert schedule(steps) == schedule(2 * steps) == end


@given(peaks, st.sets(st.integers(1, 100), max_size=5), st.floats(0.01, 0.9))
def test_step_decay_falls_at_each_milestone_and_nowhere_else(peak, milestones, factor):
    schedule = step_decay(peak, sorted(milestones), factor=factor)
    assert schedule(0) == peak
    for step in range(1, 105):
        ratio = schedule(step) / schedule(step - 1)
        assert ratio == pytest.approx(factor if step in milestones else 1.0)


@given(
    st.sampled_from(WARMUP_SHAPES),
    st.integers(0, 5000),
    st.floats(0.001, 0.5),
    peaks,
    st.floats(0, 1),
)
def test_warmup_matches_its_formula_and_continues_with_the_schedule(
    shape, steps, start, peak, share
):
    then = cosine(peak, 1000)
    schedule = warmup(then, steps, start=start, shape=shape)
    if steps:
        step = min(steps - 1, int(share * steps))
        x = step / steps
        if shape == "exponential":
            expected = math.exp((1 - x) * math.log(start) + x * math.log(peak))
        else:
            expected = start + (peak - start) * (x if shape == "linear" else x * x)
        assert schedule(step) == pytest.approx(expected, rel=1e-9)
        assert schedule(0) == pytest.approx(start)
    assert schedule(steps) == then(0) == peak
    assert [schedule(steps + s) for s in range(0, 1200, 7)] == [then(s) for s in range(0, 1200, 7)]


def tensorflow_code(peak, train_steps, warmup_steps, step):
    """lars_util.py of the MLPerf reference with Keras' PolynomialDecay, written out."""
    decay_steps = train_steps - warmup_steps + 1
    if step <= warmup_steps:
        return peak * step / warmup_steps
    fraction = min(step - warmup_steps, decay_steps) / decay_steps
    return (peak - 0.0001) * (1 - fraction) ** 2.0 + 0.0001


def nvidia_code(peak, iterations, warmup_iterations, iteration):
    """PolySchedule of NVIDIA's common/fit.py, written out."""
    if iteration <= warmup_iterations:
        return peak * (iteration / warmup_iterations)
    fraction = (iteration - warmup_iterations) / (iterations - warmup_iterations)
    return 0.0001 + (peak - 0.0001) * (1 - fraction) ** 2


mlperf_runs = st.integers(2, 5000).flatmap(
    lambda total: st.tuples(st.just(total), st.integers(1, total - 1), st.integers(0, total - 1))
)


@given(mlperf_runs, peaks)
def test_polynomial_counts_steps_as_the_codes_of_mlperf_do(run, peak):
    steps, rise, step = run
    reference = polynomial(peak, steps + 1, warmup_steps=rise, end=1e-4)
    expected = tensorflow_code(peak, steps, rise, step)
    assert reference(step) == pytest.approx(expected, rel=1e-12)
    assert reference(steps + 2) == 1e-4
    # MXNet counts the update before it asks for its learning rate.
    of_nvidia = polynomial(peak, steps, warmup_steps=rise, end=1e-4)
    expected = nvidia_code(peak, steps, rise, step + 1)
    assert of_nvidia(step + 1) == pytest.approx(expected, rel=1e-12)
    assert of_nvidia(steps) == 1e-4


WRONG = {
    "peak must be at least 0, not nan": lambda: cosine(math.nan, 10),
    "steps must be at least 1, not 0": lambda: cosine(1.0, 0),
    "end must be at least 0, not -0.1": lambda: cosine(1.0, 10, end=-0.1),
    "milestones must be ascending and at least 1, not [5, 5]": lambda: step_decay(1, [5, 5]),
    "factor must be above 0, not 0": lambda: step_decay(1, [5], factor=0),
    "shape must be one of linear, quadratic, exponential, not 'cubic'": lambda: warmup(
        constant(1), 5, shape="cubic"
    ),
    "start must be at least 0, not -1": lambda: warmup(constant(1), 5, start=-1),
    "peak of an exponential warm-up must be above 0, not 0": lambda: warmup(
        constant(0), 5, start=1, shape="exponential"
    ),
    "warmup_steps must be between 0 and total_steps (10), not 11": lambda: polynomial(
        1, 10, warmup_steps=11
    ),
    "power must be above 0, not 0": lambda: polynomial(1, 10, power=0),
    "decay_steps must be at least 0, not -1": lambda: polynomial(1, 10, decay_steps=-1),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_invalid_argument_is_named_with_the_valid_values(message):
    with pytest.raises(ValueError, match="must be") as error:
        WRONG[message]()
    assert str(error.value).startswith(message)


def test_a_span_is_converted_to_steps_and_has_the_shortest_text():
    texts = ("31ep", "500", "0.1dur", "2.5ep", "0", "1dur", "0.00001ep", "12.3456789ep")
    steps = [Span.parse(text).steps(1281167 / 65536, 1740) for text in texts]
    assert steps == [606, 500, 174, 49, 0, 1740, 0, 241]
    assert [str(Span.parse(text)) for text in texts] == [*texts]
    assert Span.parse(500) == Span.parse("500")


@pytest.mark.parametrize("text", ["", "ep", "-1ep", "1.5", "5 ep", "2dur", "1e3", "5epochs", "nan"])
def test_an_invalid_span_is_refused(text):
    with pytest.raises(ValueError, match="is not a length: write epochs as '5ep'"):
        Span.parse(text)


@given(st.floats(min_value=0, allow_infinity=False))
def test_the_text_of_a_span_parses_back_to_the_same_span(value):
    assert Span.parse(str(Span(value, "ep"))) == Span(value, "ep")
