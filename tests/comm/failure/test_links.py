"""The rates of links, measured between ranks."""

from largebatch.comm import measure_links
from tests.ranks import run_ranks


def measured(nodes):
    return measure_links(nodes)


def test_each_node_has_a_rate_that_all_ranks_know():
    found = run_ranks(4, measured, [[0, 1], [2], [3]])
    assert found == [found[0]] * 4
    assert len(found[0]) == 3
    assert min(found[0]) > 0


def test_one_node_has_no_links():
    assert run_ranks(2, measured, [[0, 1]]) == [[], []]
