"""The texts that describe the result of ``largebatch comm tune``."""

from largebatch.comm import Final, Finalist, Level, Links, Plan, Rule
from largebatch.recipes.tune.all_reduce import describe_links, describe_race


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
        Plan((Rule("leader", 2**20), Rule("leader", chunk_bytes=3 * 2**19)), 2**19),
        Plan((Rule("torus", shape=(4, 2), wire_dtype="bf16", sum_dtype="fp32"),), 2**29),
    ]
    seconds = [(3.0, 2.8, 3.2), (2.02, 2.0, 2.03), (2.0, 2.0, 2.0), ()]
    found = tuple(map(Finalist, plans, seconds))
    assert describe_race(Final(found, 1, 0.5)) == [
        "race under a backward pass of 0.5 s (range of the rounds):",
        "  ring, buckets of 25 MiB: 3 s in 3 rounds, 1.50 of the fastest (1.40 to 1.60)",
        "* leader, buckets of 25 MiB: 2.02 s in 3 rounds, 1.01 of the fastest (1.00 to 1.01)",
        "  leader, then leader in chunks of 1.5 MiB, buckets of 512 KiB: 2 s in 3 rounds, fastest",
        "  torus 4x2 in bf16 summed in fp32, buckets of 512 MiB: no time was left",
    ]
