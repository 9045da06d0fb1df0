"""A wrong option of Muon is refused, and the message says what is valid, and where."""

import pytest
import torch

from largebatch.lars import Muon


def matrix(**options):
    return {"params": [torch.nn.Parameter(torch.ones(3, 4))], **options}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adjust_lr_fn": "rms"}, "^adjust_lr_fn must be one of original, match_rms_adamw, "),
        ({"momentum": 1.0}, r"^momentum must be in \[0, 1\), not 1.0"),
        ({"momentum": "high"}, r"^momentum must be in \[0, 1\), not 'high'"),
        ({"trust_coefficient": None}, "^trust_coefficient must be > 0, not None"),
        ({"others": {"momentum": "high"}}, r"^others: momentum must be in \[0, 1\), not 'high'"),
        ({"others": {"eps": "1e-8"}}, "^others: eps must be >= 0, or None, not '1e-8'"),
        ({"others": {"rule": "adam"}}, "^others: rule must be one of sgd, lars, adamw, not 'adam'"),
        ({"others": {"betas": 0.9}}, r"^others: betas must be two in \[0, 1\), not 0.9"),
        ({"others": {"momentum": 0}}, "^others: nesterov must be False unless momentum > 0"),
        ({"others": {"orthogonal": True}}, "^others: 'orthogonal' is not an option"),
        ({"others": {"params": []}}, "^others: 'params' is not an option"),
        ({"others": {"lr_scale": -1}}, "^others: lr_scale must be >= 0, and without lr, not -1"),
        ({"others": {"lr_scale": 2, "lr": 1}}, "^others: lr_scale must be >= 0, and without lr"),
    ],
)
def test_a_wrong_option_is_named_with_its_place(options, message):
    with pytest.raises(ValueError, match=message):
        Muon([matrix()], 0.1, **options)


def test_a_rule_is_refused_in_a_group_that_would_be_orthogonalised():
    with pytest.raises(ValueError, match=r"rule 'adamw' has no effect .* valid: orthogonal=False"):
        Muon([matrix(rule="adamw")], 0.1)
    optimizer = Muon([matrix(), matrix(rule="adamw", orthogonal=False)], 0.1)
    assert [group["orthogonal"] for group in optimizer.param_groups] == [True, False]
    copied = Muon([dict(group) for group in optimizer.param_groups], 0.1)  # has all keys
    assert [group["rule"] for group in copied.param_groups] == ["sgd", "adamw"]


def test_other_groups_begin_with_a_multiple_of_the_rate():
    given = matrix(orthogonal=False, lr=0.4)
    optimizer = Muon([matrix(), matrix(orthogonal=False), given], 0.2, others={"lr_scale": 1.5})
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.3, 0.4])
    rate = torch.tensor(0.2)
    optimizer = Muon([matrix(), matrix(orthogonal=False)], rate, others={"lr_scale": 1.5})
    assert optimizer.param_groups[1]["lr"].item() == pytest.approx(0.3)
