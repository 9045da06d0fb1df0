"""The step counts of the paper, and the predictions of its speed-ups."""

import json

import pytest

from benchmarks.comm.published import SPEED_UPS, PaperForm, best_groups, paper_form
from benchmarks.comm.published import steps_of_the_paper as steps
from benchmarks.comm.simulation import published
from benchmarks.tables import RESULTS
from largebatch.comm import ALGORITHMS, Topology


def messages(name, p, per_node):
    traffic = ALGORITHMS[name].traffic(1, Topology.of(p, per_node))
    return traffic.intra_messages + traffic.inter_messages


@pytest.mark.parametrize(
    ("p", "counts"),
    [(1024, {4: 522, 8: 282, 16: 186, 32: 186, 64: 282}), (2048, {16: 314, 32: 250})],
)
def test_latency_steps_match_the_paper(p, counts):
    assert messages("ring", p, 8) == 2 * (p - 1)
    for k, count in counts.items():
        assert steps(p, k) == count == 4 * (k - 1) + 2 * (p // k - 1)
        # The implementation needs fewer steps in the group.
        assert messages("leader", p, k) == k - 1 + (k - 1).bit_length() + 2 * (p // k - 1)
        assert messages("hierarchical", p, k) == 2 * (k - 1) + 2 * (p // k - 1) < count


def test_the_group_sizes_with_the_fewest_steps():
    assert best_groups(1024) == (186, [16, 32])
    assert best_groups(2048) == (250, [32])


def test_all_data_passes_through_the_masters_in_the_papers_algorithm():
    traffic = PaperForm().traffic(1000, Topology.of(16, 4))
    assert (traffic.intra_bytes, traffic.inter_bytes) == (3000, 1500)


def test_predictions_are_close_to_published_speed_ups():
    with paper_form():
        for entry in SPEED_UPS:
            assert 0.5 * entry.published < entry.run()[0] < 1.5 * entry.published
    assert "paper" not in ALGORITHMS


def test_the_stored_results_match_the_current_model():
    kept = json.loads((RESULTS / "simulation.json").read_text())["published"]
    with paper_form():
        now = json.loads(json.dumps(published()))
    for old, new in zip(kept["speed_up"], now["speed_up"], strict=True):
        assert new["name"] == old["name"]
        assert new["predicted"] == pytest.approx(old["predicted"], rel=1e-6)
    assert now["latency_steps"] == kept["latency_steps"]
