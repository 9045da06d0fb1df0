"""The texts that describe the result of ``largebatch comm tune``."""

import pytest

from largebatch.comm import Level, Links, Rule
from largebatch.recipes.tune.comm import describe_links, describe_rule, format_bytes


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule("ring"), "ring"),
        (Rule("leader", chunk_bytes=2**21), "leader in chunks of 2 MiB"),
        (Rule("torus", shape=(4, 2), wire_dtype="bf16"), "torus 4x2 in bf16"),
        (
            Rule("hierarchical", wire_dtype="fp16", sum_dtype="fp32"),
            "hierarchical in fp16 summed in fp32",
        ),
        (Rule("ring", predivide_factor=64), "ring divided by 64 before the sum"),
    ],
)
def test_a_rule_is_described_with_its_options(rule, text):
    assert describe_rule(rule) == text


def test_sizes_have_binary_units():
    sizes = (512, 1024, 3 * 2**19, 2**30)
    assert [format_bytes(size) for size in sizes] == ["512 B", "1 KiB", "1.5 MiB", "1 GiB"]


def test_known_links_are_described_with_latency_and_rate():
    links = Links(None, Level.of(9.6, 100), host_seconds_per_byte=1e-9)
    assert describe_links(links) == [
        "links between nodes: 9.6 us, 100 Gbit/s",
        "links inside a node share the host: 8 Gbit/s for all ranks",
    ]
    assert describe_links(Links(Level(1e-6, 0.0), None)) == [
        "links inside a node: 1 us, no time per byte"
    ]
