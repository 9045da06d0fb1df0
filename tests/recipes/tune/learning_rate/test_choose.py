"""What a search does next: its stages within a budget, and the settings of each trial."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.recipes.tune.learning_rate import choose
from largebatch.recipes.tune.learning_rate.budget import Budget, Lengths, next_stage
from largebatch.recipes.tune.learning_rate.choose import next_settings, quantiles
from largebatch.recipes.tune.learning_rate.space import Dimension
from largebatch.recipes.tune.learning_rate.trials import Tried, ranked, score

SPACE = (Dimension("lr", 0.1, 100.0), Dimension("warmup", 0.0, 0.4, "linear"))
GUESSES = [{"lr": 10.0, "warmup": 0.0}, {"lr": 10.0, "warmup": 0.15}]
LENGTHS = Lengths(coarse=5.0, fine=20.0)


def tried(stage, number, lr, warmup=0.1, state="finished", top1=50.0, loss=1.0, epochs=5.0):
    return Tried(stage, number, {"lr": lr, "warmup": warmup}, state, top1, loss, epochs, 60.0)


@given(
    trials=st.one_of(st.none(), st.integers(1, 30)),
    epochs=st.one_of(st.none(), st.floats(20, 300)),
    data=st.data(),
)
@settings(max_examples=50)
def test_trials_stay_within_the_budget_and_the_last_ones_are_fine(trials, epochs, data):
    if trials is None and epochs is None:
        epochs = 160.0
    done = []
    while stage := next_stage(done, LENGTHS, Budget(trials, epochs)):
        state = data.draw(st.sampled_from(["finished", "finished", "pruned", "diverged"]))
        part = 1.0 if state == "finished" else data.draw(st.floats(0.1, 1))
        cost = part * LENGTHS.of(stage)
        done.append(tried(stage, len(done), 1.0, state=state, epochs=cost))
    assert trials is None or len(done) == trials or epochs is not None
    spent = sum(t.epochs for t in done)
    assert epochs is None or spent <= epochs + 1e-3
    stages = [t.stage for t in done]
    assert stages == sorted(stages)  # coarse ones first
    finished = any(t.state == "finished" for t in done if t.stage == "coarse")
    assert stages[-1] == "fine"  # one of full length always fits
    # Nothing that would have fitted is left.
    assert (trials is not None and len(done) == trials) or epochs - spent < LENGTHS.fine
    if epochs is not None and finished:
        of_first = next(i for i, t in enumerate(done) if t.state == "finished")
        coarse = sum(t.epochs for t in done[of_first + 1 :] if t.stage == "coarse")
        assert coarse <= epochs / 2 + 1e-3


def test_trials_that_run_count_with_their_whole_length():
    running = [tried("coarse", i, i + 1.0, state="running", epochs=0.0) for i in range(4)]
    assert next_stage(running[:3], LENGTHS, Budget(epochs=40)) == "coarse"
    assert next_stage(running, LENGTHS, Budget(epochs=40)) == "fine"
    fine = [*running, tried("fine", 0, 1.0, state="running", epochs=0.0)]
    assert next_stage(fine, LENGTHS, Budget(epochs=40)) is None
    assert next_stage(fine, LENGTHS, Budget(epochs=80)) == "coarse"  # resumed with a larger budget


def test_interrupted_trials_count_for_their_epochs_only():
    lost = [tried("coarse", 0, 1.0, state="interrupted", epochs=4.0)]
    assert next_stage(lost, LENGTHS, Budget(trials=1)) == "fine"
    assert next_stage(lost, LENGTHS, Budget(epochs=23)) is None


def test_no_trial_begins_that_would_outlast_the_time():
    done = [tried("coarse", 0, 1.0)]  # a minute for 5 epochs: 4 for a fine one
    assert next_stage(done, LENGTHS, Budget(minutes=10), elapsed_seconds=60) == "coarse"
    assert next_stage(done, LENGTHS, Budget(minutes=10), elapsed_seconds=290) == "fine"
    assert next_stage(done, LENGTHS, Budget(minutes=10), elapsed_seconds=370) is None
    assert next_stage(done, LENGTHS, Budget(minutes=10), 370, machine="other") == "fine"


def test_without_a_coarse_stage_all_trials_are_fine():
    assert next_stage([], Lengths(None, 20.0), Budget(epochs=160)) == "fine"


def test_guesses_come_first_then_points_and_then_the_sampler():
    done = []
    for number in range(12):
        found = next_settings(done, [], SPACE, GUESSES, "top1")
        assert found not in [t.settings for t in done]
        assert all(d.low <= found[d.name] <= d.high for d in SPACE)
        top1 = 80 - 20 * abs(math.log10(found["lr"] / 2.0)) - 50 * abs(found["warmup"] - 0.2)
        state = "finished" if found["lr"] < 30 else "diverged"
        done.append(Tried("coarse", number, found, state, top1, 1 - top1 / 100, 5.0))
    assert [t.settings for t in done[:2]] == GUESSES
    # The sampler stays where the points were good.
    assert all(0.3 < t.settings["lr"] < 15 for t in done[-2:])
    # An interrupted one comes before any new one.
    lost = Tried("coarse", 12, {"lr": 7.77, "warmup": 0.3}, "interrupted")
    assert next_settings([*done, lost], [], SPACE, GUESSES, "top1") == lost.settings
    again = Tried("coarse", 13, lost.settings, "running")
    assert next_settings([*done, lost, again], [], SPACE, GUESSES, "top1") != lost.settings


def test_points_stay_near_and_below_the_lowest_rate_that_diverged():
    done = []
    for number in range(len(GUESSES) + choose.POINTS * len(SPACE) + 3):  # points and the sampler's
        found = next_settings(done, [], SPACE, GUESSES, "top1")
        assert found not in [t.settings for t in done]
        state = "finished" if found["lr"] < 3 else "diverged"
        done.append(tried("coarse", number, state=state, **found))
    lowest = math.inf
    rates = [t.settings["lr"] for t in done]
    for rate in rates:
        assert rate <= 2 * lowest
        lowest = min(lowest, rate if rate >= 3 else math.inf)
    assert sum(rate < 3 for rate in rates) >= 4
    # The lower part is filled evenly: below and above its middle.
    assert {rate < math.sqrt(0.1 * 6) for rate in rates[2:]} == {False, True}


def test_fine_trials_repeat_the_best_coarse_ones_and_stay_near():
    values = [(1.0, 60.0), (3.0, 75.0), (9.0, 74.0), (27.0, 70.0), (81.0, 20.0)]
    coarse = [tried("coarse", i, lr, top1=top1) for i, (lr, top1) in enumerate(values)]
    coarse.append(tried("coarse", 5, 90.0, state="diverged", top1=99.0))
    fine = []
    for number in range(6):
        found = next_settings(fine, coarse, SPACE, GUESSES, "top1")
        assert found not in [t.settings for t in fine]
        top1 = 90 - 10 * abs(math.log10(found["lr"] / 5.0))
        fine.append(Tried("fine", number, found, "finished", top1, 0.5, 20.0))
    assert [t.settings["lr"] for t in fine[:3]] == [3.0, 9.0, 27.0]
    for number in range(3, 6):  # within a factor of the best one before
        rates = [t.settings["lr"] for t in fine[:number]]
        top = min(rates, key=lambda lr: abs(math.log(lr / 5)))
        assert top / 4.01 <= fine[number].settings["lr"] <= top * 4.01


@pytest.mark.parametrize("state", ["running", "diverged"])
def test_a_worker_goes_on_while_no_fine_trial_has_finished(state):
    """The others still train the best coarse settings, or these diverge at full length."""
    coarse = [
        tried("coarse", i, lr, top1=top1) for i, (lr, top1) in enumerate([(3.0, 70), (9, 60)])
    ]
    for number in (1, 2):
        fine = [Tried("fine", i, t.settings, state) for i, t in enumerate(coarse[:number])]
        found = next_settings(fine, coarse[:number], SPACE, GUESSES, "top1")
        assert found not in [t.settings for t in fine]
        assert 3.0 / 4.01 <= found["lr"] <= 3.0 * 4.01


def test_an_interrupted_coarse_trial_is_no_bad_one(monkeypatch):
    seen = []
    monkeypatch.setattr(choose, "_suggested", lambda space, known, *_: seen.extend(known) or {})
    coarse = [
        Tried("coarse", 0, {"lr": 3.0, "warmup": 0.1}, "interrupted"),
        tried("coarse", 1, 3.0),
        tried("coarse", 2, 90.0, state="diverged"),
    ]
    next_settings([tried("fine", 0, 3.0)], coarse, SPACE, GUESSES, "top1")
    assert [(t.stage, t.state) for t in seen] == [("fine", "finished"), ("coarse", "diverged")]


def test_the_same_trials_give_the_same_suggestion_in_any_order():
    done = [tried("coarse", i, 0.2 * 1.6**i, 0.03 * i, top1=50 + i % 5) for i in range(12)]
    wanted = next_settings(done, [], SPACE, [], "top1")
    assert next_settings(done[::-1], [], SPACE, [], "top1") == wanted


def test_better_is_more_accurate_then_lower_in_loss_and_finished():
    a = tried("fine", 0, 1.0, top1=99.0, loss=0.3)
    b = tried("fine", 1, 2.0, top1=99.0, loss=0.2)
    c = tried("fine", 2, 3.0, top1=98.0, loss=0.1)
    pruned = tried("fine", 3, 4.0, top1=100.0, loss=0.0, state="pruned")
    diverged = tried("fine", 4, 5.0, top1=100.0, loss=math.nan, state="diverged")
    coarse = tried("coarse", 0, 6.0, top1=100.0, loss=0.0)
    everything = [diverged, coarse, c, pruned, a, b]
    assert ranked(everything, "top1")[:4] == [b, a, c, coarse]
    assert ranked(everything, "loss")[:4] == [c, b, a, coarse]
    assert score(diverged, "top1") < score(pruned, "top1") < score(c, "top1")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=12))
def test_quantiles_keep_the_order_and_bound_outliers(scores):
    found = quantiles(scores)
    pairs = list(zip(scores, found, strict=True))
    for a, x in pairs:
        for b, y in pairs:
            assert (a < b) == (x < y - 1e-12)
    assert max(map(abs, found)) < 2
