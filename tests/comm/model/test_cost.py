"""The latency-bandwidth model follows published formulas, and the fit recovers known links."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from largebatch.comm import (
    ALGORITHMS,
    Level,
    Links,
    Measurement,
    Rule,
    Topology,
    candidates,
    predict_seconds,
)
from largebatch.comm.tuning.fit import fit_links, non_negative_least_squares

LINKS = Links(Level(2e-6, 1e-10), Level(1e-5, 8e-10))
SIZES = [4**k for k in range(5, 14)]


def test_host_time_is_proportional_to_the_bytes_that_all_ranks_of_a_node_send():
    n, topology = 10**6, Topology.of(8, 4)
    shared = Links(LINKS.intra, LINKS.inter, host_seconds_per_byte=1e-9)
    for name in ("hierarchical", "leader"):
        more = predict_seconds(Rule(name), n, topology, shared)
        less = predict_seconds(Rule(name), n, topology, LINKS)
        # Both send n bytes 2 (L - 1) times inside a node, over all its ranks.
        assert more - less == pytest.approx(2 * 3 * n * 1e-9)


def test_phases_add_up_and_a_ring_is_as_fast_as_its_slowest_link():
    n, topology = 10**7, Topology.of(8, 4)
    grouped = predict_seconds(Rule("hierarchical"), n, topology, LINKS)
    inside = 2 * 3 * 2e-6 + 2 * 3 / 4 * n * 1e-10
    across = 2 * 1e-5 + 2 * 1 / 2 * n * 8e-10
    assert grouped == pytest.approx(inside + across)
    # 2 (p - 1) alpha + 2 (p - 1) / p n beta (Thakur et al. 2005), where links are equal
    flat = predict_seconds(Rule("ring"), n, topology, LINKS)
    assert flat == pytest.approx(12 * 2e-6 + 2 * 1e-5 + 2 * 7 / 8 * n * 8e-10)


def test_chunks_overlap_the_phases():
    n, chunk, topology = 10**7, 10**6, Topology.of(8, 4)
    one = ALGORITHMS["hierarchical"].traffic(chunk, topology)
    inside, across = LINKS.seconds(one, 2)
    cut = predict_seconds(Rule("hierarchical", chunk_bytes=chunk), n, topology, LINKS)
    assert cut == pytest.approx(inside + across + 9 * max(inside, across))
    whole = predict_seconds(Rule("hierarchical"), n, topology, LINKS)
    assert across * 10 < cut < whole
    for small in (chunk, 1000):
        cut = predict_seconds(Rule("hierarchical", chunk_bytes=chunk), small, topology, LINKS)
        assert cut == predict_seconds(Rule("hierarchical"), small, topology, LINKS)


def test_half_precision_halves_the_bytes():
    n, topology = 10**6, Topology.of(8, 4)
    for name in ALGORITHMS:
        half, same = Rule(name, wire_dtype="fp16"), Rule(name, wire_dtype="bf16")
        found = predict_seconds(half, 2 * n, topology, LINKS)
        assert found == predict_seconds(Rule(name), n, topology, LINKS)
        assert found == predict_seconds(same, n, topology, LINKS, element_bytes=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Level(-1.0, 0.0), "of a link cannot be"),
        (lambda: Level(0.0, math.inf), "of a link cannot be"),
        (lambda: Level(math.nan, 0.0), "of a link cannot be"),
        (lambda: Level.of(1, 0), "cannot be 0 Gbit/s; valid: above 0"),
        (lambda: fit_links([], Topology.of(4, 2)), "nothing to fit"),
        (
            lambda: predict_seconds(Rule("ring"), 9, Topology.of(4, 2), Links(LINKS.intra, None)),
            "the links between nodes are unknown",
        ),
    ],
)
def test_impossible_and_unknown_links_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_link_converts_microseconds_and_gbit_per_second():
    level = Level.of(9.6, 100)
    assert (level.latency_seconds, level.seconds_per_byte) == pytest.approx((9.6e-6, 1 / 12.5e9))
    assert (level.latency_us, level.gbit) == pytest.approx((9.6, 100))


numbers = st.floats(-100, 100).map(lambda v: round(v, 3))


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(
            arrays(float, (6, n), elements=numbers), arrays(float, (6,), elements=numbers)
        )
    )
)
def test_non_negative_least_squares_finds_the_optimum(problem):
    a, b = problem
    # With nearly dependent columns, rounding decides.
    assume(np.linalg.matrix_rank(a) == a.shape[1] and np.linalg.cond(a) < 1e4)
    x = non_negative_least_squares(a, b)
    slope = a.T @ (a @ x - b)  # the conditions of Karush, Kuhn and Tucker
    scale = 1e-8 * (1 + np.abs(a).max()) ** 2 * (1 + np.abs(b).max())
    assert (x >= 0).all()
    assert (slope >= -scale).all()
    assert np.abs(slope * x).max() <= scale * (1 + x.max())


def measured(links, topology):
    return [
        Measurement(rule, size, (predict_seconds(rule, size, topology, links),))
        for rule, size in product(candidates(topology), SIZES)
    ]


latencies, rates = st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-7)


@settings(max_examples=25)
@given(st.builds(Links, *[st.builds(Level, latencies, rates)] * 2, st.just(0.0) | rates))
def test_the_fit_recovers_the_links_behind_the_times(links):
    topology = Topology.of(8, 4)
    fit = fit_links(measured(links, topology), topology)
    assert fit.error < 1e-6
    for rule, size in product(candidates(topology), (1024, 2**20, 2**26)):
        refitted = predict_seconds(rule, size, topology, fit.links)
        assert refitted == pytest.approx(predict_seconds(rule, size, topology, links), rel=1e-3)


def test_a_level_without_messages_is_omitted_with_a_note():
    """The other one may have no latency."""
    free = Links(*(Level(0.0, level.seconds_per_byte) for level in (LINKS.intra, LINKS.inter)))
    for per_node, known, unknown in ((4, "intra", "inter"), (1, "inter", "intra")):
        topology = Topology.of(4, per_node)
        for links in (LINKS, free):
            fit = fit_links(measured(links, topology), topology)
            assert getattr(fit.links, unknown) is None
            level, expected = (getattr(each, known) for each in (fit.links, links))
            assert level.latency_us == pytest.approx(expected.latency_us, abs=1e-3)
            assert level.gbit == pytest.approx(expected.gbit)
            (note,) = fit.notes
            assert "cannot be fitted" in note
