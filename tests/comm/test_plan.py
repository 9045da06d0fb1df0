"""Plans choose a rule by message size, and are saved, loaded and checked."""

import json
from unittest import mock

import pytest
import torch.distributed as dist

from largebatch.comm import Plan, PlanError, Rule, Topology
from largebatch.comm import topology as layout


def test_a_message_takes_the_first_rule_that_is_large_enough():
    plan = Plan((Rule("hierarchical", 1000), Rule("ring", 5000, "bf16"), Rule("hierarchical")))
    chosen = [plan.rule_for(size) for size in (1, 1000, 1001, 5000, 5001, 10**9)]
    assert [plan.rules.index(rule) for rule in chosen] == [0, 0, 1, 1, 2, 2]


def test_a_saved_plan_is_loaded_unchanged(tmp_path):
    rules = (
        Rule("hierarchical", 4096, "fp16"),
        Rule("torus", 8192, shape=(2, 4), chunk_bytes=1000),
        Rule("hierarchical", 10**6, "fp16", sum_dtype="fp32"),
        Rule("ring"),
    )
    plan = Plan(rules, fusion_threshold_bytes=123)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["rules"][0] == {
        "algorithm": "hierarchical",
        "max_bytes": 4096,
        "wire_dtype": "fp16",
    }


def test_a_plan_file_of_version_1_stays_readable(tmp_path):
    (tmp_path / "plan.json").write_text(
        """
        {
          "version": 1,
          "rules": [
            {"algorithm": "leader", "max_bytes": 65536, "wire_dtype": null},
            {"algorithm": "hierarchical", "max_bytes": null, "wire_dtype": "fp16",
             "chunk_bytes": 4194304}
          ],
          "fusion_threshold_bytes": 16777216
        }
        """
    )
    rules = (Rule("leader", 65536), Rule("hierarchical", None, "fp16", 2**22))
    assert Plan.load(tmp_path / "plan.json") == Plan(rules, 2**24)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "Expecting value"),
        ("[]", "plan: not an object; valid: an object with keys version, rules, fusion"),
        ('{"rules": []}', "version: missing key in a plan; required: version, rules"),
        ('{"version": 2, "rules": []}', "version: unknown value 2; valid: 1"),
        ('{"version": 1, "rules": []}', "rules: the last rule must take any size"),
        (
            '{"version": 1, "rules": [{"algorithm": "star"}]}',
            "algorithm: unknown value 'star'; valid: ring, hier",
        ),
        ('{"version": 1, "rules": [{"algorithm": "ring", "max_bytes": 5}]}', "must take any size"),
        ('{"version": 1, "rules": {}}', "rules: {} is not a list"),
        (
            '{"version": 1, "rules": ["ring"]}',
            "rule: not an object; valid: an object with keys algorithm",
        ),
        ('{"version": 1, "rules": [{"max_bytes": 5}]}', "algorithm: missing key in a rule"),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "size": 5}]}',
            "size: unknown key in a rule; valid: algorithm, max_bytes, wire_dtype",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "wire_dtype": "fp8"}]}',
            "wire_dtype: unknown value 'fp8'",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": []}]}',
            r"algorithm: unknown value \[\]; valid: ring",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "chunk_bytes": 4096}]}',
            "chunk_bytes: algorithm ring has no phases.*valid with: hierarchical, leader, torus",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "leader", "chunk_bytes": 0}]}',
            "chunk_bytes: 0 is not a positive integer; valid: bytes, or null",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "torus", "shape": [4]}]}',
            r"shape: \[4\] is not a grid; valid: \[X, Y\], two positive integers, or null",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "shape": [2, 4]}]}',
            "shape: algorithm ring has no shape; valid with: torus",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "max_bytes": "1M"}]}',
            "max_bytes: '1M' is not a positive integer",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "wire_dtype": {}}]}',
            "wire_dtype: unknown value {}; valid: fp16, bf16, null",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "torus", "sum_dtype": "fp16"}]}',
            "sum_dtype: unknown value 'fp16'; valid: fp32, null",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "sum_dtype": "fp32"}]}',
            "sum_dtype: algorithm ring sums where it .*; valid with: hierarchical, torus",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "max_bytes": 5}, '
            '{"algorithm": "ring", "max_bytes": 5}, {"algorithm": "ring"}]}',
            r"max_bytes: \[5, 5\] do not ascend",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring"}], "fusion_threshold_bytes": 0}',
            "fusion_threshold_bytes: 0 is not a positive integer",
        ),
    ],
)
def test_an_invalid_file_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=message) as error:
        Plan.load(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"none.json: No such file"):
        Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("rule", "shared"),
    [
        (Rule("hierarchical"), True),
        (Rule("leader"), True),
        (Rule("torus", shape=(4, 2)), True),
        (Rule("torus", shape=(2, 4)), False),
        (Rule("hierarchical", wire_dtype="fp16", sum_dtype="fp32"), False),
        (Rule("ring"), False),
    ],
    ids=str,
)
def test_memory_is_shared_only_for_rules_that_use_it(rule, shared):
    with (
        mock.patch.object(dist, "get_backend", return_value="gloo"),
        mock.patch.object(layout, "group_of_rank"),
        mock.patch.object(layout, "connect") as connect,
    ):
        Plan((rule,)).connect(Topology.of(8, 4))
    assert connect.called == shared
