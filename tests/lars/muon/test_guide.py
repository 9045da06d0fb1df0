"""The snippets of docs/guides/muon.md run as printed."""

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

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
