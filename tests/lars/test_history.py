"""TrustRatioHistory: the recorded ratios are those of each step, and recording never syncs."""

import pytest
import torch
from torch import nn

from largebatch.lars import LARS, TrustRatioHistory
from tests.host_reads import NoHostReads
from tests.lars.problems import tensors
from tests.replay import Recording


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_a_history_holds_the_ratios_of_each_step_since_the_last_read(implementation):
    """Without the steps in which a tensor had no gradient."""
    parameters = [nn.Parameter(t) for t in tensors(0)]
    optimizer = LARS(
        [
            {"params": [("scalar", parameters[0])], "adapt": False},
            {"params": [("a", parameters[3]), ("b", parameters[4])]},
        ],
        1.0,
        implementation=implementation,
    )
    history = TrustRatioHistory(optimizer)
    assert history.read() == {}
    for start in (0, 3):
        expected = {"a": [], "b": []}
        for step in range(start, start + 3):
            for parameter, gradient in zip(parameters, tensors(step + 1), strict=True):
                parameter.grad = gradient
            if step in (1, 3):  # frozen for a step
                parameters[3].grad = None
            optimizer.step()
            with NoHostReads():
                history.record()
            for name in expected.keys() & optimizer.trust_ratios().keys():
                expected[name].append(optimizer.trust_ratios()[name])
        assert [len(values) for values in expected.values()] == [2, 3]
        read = history.read()
        assert read.keys() == expected.keys()
        for name, values in expected.items():
            assert read[name].dtype == torch.float32
            torch.testing.assert_close(read[name], torch.tensor(values))


def test_ratios_that_replays_of_a_graph_change_are_copied(monkeypatch):
    """As is the tensor that trust_ratios() reads, which stays at one address from then on."""
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([parameter], 0.0, implementation="foreach")
    history = TrustRatioHistory(optimizer)
    recorder, expected, addresses = None, [], set()
    for step in range(7):
        if recorder and step < 5:
            parameter.grad.fill_(step + 1.0)
            recorder.replay()
        else:
            parameter.grad = torch.full((2, 2), step + 1.0)
            with monkeypatch.context() as patch, Recording() as recording:
                patch.setattr("largebatch.lars.capture.captures", lambda _, now=step: now == 1)
                optimizer.step()
            recorder = recording if step == 1 else recorder
        history.record()
        expected.append(0.001 / (step + 1.0))
        if step:
            addresses.add(optimizer._ratios[0, 0].values.data_ptr())
        assert optimizer.trust_ratios()["group0.0"] == pytest.approx(expected[-1])
    assert history.read()["group0.0"].tolist() == pytest.approx(expected)
    assert len(addresses) == 1
