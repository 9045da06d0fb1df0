"""The snippets of docs/guides/muon.md run as printed, and what it says of steps holds."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from largebatch.lars import Muon

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "muon.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- snippet: (\w+) -->\n```python\n(.*?)```", GUIDE, re.DOTALL))


def run(name, **names):
    """Run a snippet after the imports of the first, and train its optimizer for two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.Linear(4, 3))
    names = {"model": model, "nn": nn, "device": "cpu", **names}
    imports = "\n".join(line for line in SNIPPETS["loop"].splitlines() if "import" in line)
    exec(imports + "\n" + SNIPPETS[name], names)
    optimizer, weights = names["optimizer"], [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        optimizer.step()
    moved = [not torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)]
    assert all(moved)
    orthogonal = [g["param_names"] for g in optimizer.param_groups if g["orthogonal"]]
    assert orthogonal == [["2.weight"]]
    return names


def test_snippets_are_short_and_all_are_run():
    assert list(SNIPPETS) == ["loop", "precision", "ranks"]
    assert GUIDE.count("```python") == len(SNIPPETS)
    assert all(len(code.splitlines()) <= 8 for code in SNIPPETS.values())


def test_the_snippet_for_a_loop(capsys):
    names = run("loop")
    assert "orthogonal" in capsys.readouterr().out
    assert [g["lr"] for g in names["optimizer"].param_groups if not g["orthogonal"]] == [0.3, 0.3]


def test_the_snippet_for_mixed_precision():
    optimizer = run("precision")["optimizer"]
    assert optimizer.master_weights
    masters = [state["master"] for state in optimizer.state.values() if "master" in state]
    assert {master.dtype for master in masters} == {torch.float32}


def test_the_snippet_for_several_ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert run("ranks")["optimizer"].process_group is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def size_of_step(shape, **options):
    """Return the norm of the weight before a step with lr = 1, of the step, and its largest value.

    Newton-Schulz takes steps until it has converged.
    """
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    before = weight.detach().clone()
    if options.get("norm_projection"):
        before *= shape[0] ** 0.5 / before.norm()
    weight.grad = torch.randn(shape, dtype=torch.float64)
    options |= {"ns_coefficients": "polar_express", "ns_steps": 16}
    Muon([weight], 1.0, **options).step()
    step = weight.detach() - before
    return before.norm().item(), step.norm().item(), torch.linalg.matrix_norm(step, 2).item()


@pytest.mark.parametrize(("rows", "columns"), [(4, 9), (9, 4)])
def test_what_the_learning_rate_is(rows, columns):
    """The table of adjust_lr_fn."""
    torch.manual_seed(0)
    shape, tall = (rows, columns), rows > columns

    def by(adjust_lr_fn, norm_projection=False):
        return size_of_step(shape, adjust_lr_fn=adjust_lr_fn, norm_projection=norm_projection)

    before, step, _ = by("none", norm_projection=True)
    assert (step == pytest.approx(before)) != tall
    before, step, _ = by("original", norm_projection=True)
    assert step == pytest.approx(before)
    assert by("original")[2] == pytest.approx((rows / columns) ** 0.5 if tall else 1.0)
    assert by("spectral_unclamped")[2] * (columns / rows) ** 0.5 == pytest.approx(1.0)
    assert by("match_rms_adamw")[1] / (rows * columns) ** 0.5 == pytest.approx(0.2)
    before, step, _ = by("trust_ratio")
    assert step == pytest.approx(1e-3 * before)
