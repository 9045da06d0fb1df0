"""The texts that describe the result of ``largebatch comm tune``."""

import pytest

from largebatch.comm import Final, Finalist, Level, Links, Plan, Rule
from largebatch.recipes.tune.all_reduce import describe_links, describe_race
from largebatch.recipes.words import binary_size, describe_rule


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule("leader", chunk_bytes=2**21), "leader in chunks of 2 MiB"),
        (Rule("torus", shape=(4, 2), wire_dtype="bf16"), "torus 4x2 in bf16"),
        (
            Rule("hierarchical", wire_dtype="fp16", sum_dtype="fp32"),
            "hierarchical in fp16 summed in fp32",
        ),
    ],
)
def test_a_rule_is_described_with_its_options(rule, text):
    assert describe_rule(rule) == text


def test_sizes_have_binary_units():
    sizes = (512, 1024, 3 * 2**19, 2**30)
    assert [binary_size(size) for size in sizes] == ["512 B", "1 KiB", "1.5 MiB", "1 GiB"]


def test_known_links_are_described_with_latency_and_rate():
    links = Links(None, Level.of(9.6, 100), host_seconds_per_byte=1e-9)
    assert describe_links(links) == [
        "links between nodes: 9.6 us, 100 Gbit/s",
        "links inside a node share the host: 8 Gbit/s for all ranks",
    ]
    assert describe_links(Links(Level(1e-6, 0.0), None)) == [
        "links inside a node: 1 us, no time per byte"
    ]


def test_a_race_is_described_with_the_range_of_each_ratio():
    plans = [
        Plan.single(),
        Plan.single("leader"),
        Plan((Rule("leader", 2**20), Rule("leader", chunk_bytes=2**22)), 2**23),
        Plan.single("hierarchical"),
    ]
    seconds = [(3.0, 2.8, 3.2), (2.02, 2.0, 2.03), (2.0, 2.0, 2.0), ()]
    found = tuple(map(Finalist, plans, seconds))
    assert describe_race(Final(found, 1, 0.5)) == [
        "race under a backward pass of 0.5 s (range of the rounds):",
        "  ring, buckets of 25 MiB: 3 s in 3 rounds, 1.50 of the fastest (1.40 to 1.60)",
        "* leader, buckets of 25 MiB: 2.02 s in 3 rounds, 1.01 of the fastest (1.00 to 1.01)",
        "  leader, then leader in chunks of 4 MiB, buckets of 8 MiB: 2 s in 3 rounds, fastest",
        "  hierarchical, buckets of 25 MiB: no time was left",
    ]
