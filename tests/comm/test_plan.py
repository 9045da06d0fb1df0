"""Plans: choice by size, and the file."""

import json

import pytest

from largebatch.comm import Plan, PlanError, Rule


def test_a_message_takes_the_first_rule_that_is_large_enough():
    plan = Plan((Rule("hierarchical", 1000), Rule("ring", 5000, "bf16"), Rule("hierarchical")))
    chosen = [plan.rule_for(size) for size in (1, 1000, 1001, 5000, 5001, 10**9)]
    assert [plan.rules.index(rule) for rule in chosen] == [0, 0, 1, 1, 2, 2]


def test_it_comes_back_from_its_file(tmp_path):
    rules = (
        Rule("hierarchical", 4096, "fp16"),
        Rule("torus", 8192, shape=(2, 4), chunk_bytes=1000),
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "Expecting value"),
        ("[]", "a plan must be an object with the keys version, rules, fusion"),
        ('{"rules": []}', "the key 'version' of a plan is missing"),
        ('{"version": 2, "rules": []}', "version must be 1"),
        ('{"version": 1, "rules": []}', "the last rule of a plan must take any size"),
        ('{"version": 1, "rules": [{"algorithm": "star"}]}', "'star' is not one of ring, hier"),
        ('{"version": 1, "rules": [{"algorithm": "ring", "max_bytes": 5}]}', "must take any size"),
        ('{"version": 1, "rules": {}}', "rules must be a list"),
        ('{"version": 1, "rules": ["ring"]}', "a rule must be an object with the keys algorithm"),
        ('{"version": 1, "rules": [{"max_bytes": 5}]}', "the key 'algorithm' of a rule is missing"),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "size": 5}]}',
            "unknown key 'size' of a rule; valid: algorithm, max_bytes, wire_dtype",
        ),
        ('{"version": 1, "rules": [{"algorithm": "ring", "wire_dtype": "fp8"}]}', "'fp8' is not"),
        ('{"version": 1, "rules": [{"algorithm": []}]}', r"algorithm \[\] is not one of ring"),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "chunk_bytes": 4096}]}',
            "chunk_bytes does not go with algorithm ring.*valid: hierarchical, leader, torus",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "leader", "chunk_bytes": 0}]}',
            "chunk_bytes must be a positive whole number or null, not 0",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "torus", "shape": [4]}]}',
            r"shape must be \[X, Y\], two positive whole numbers, or null, not \[4\]",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "shape": [2, 4]}]}',
            "shape goes with algorithm torus, not ring",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "max_bytes": "1M"}]}',
            "max_bytes must be a positive whole number, not '1M'",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "wire_dtype": {}}]}',
            "wire_dtype {} is not one of fp16, bf16, null",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring", "max_bytes": 5}, '
            '{"algorithm": "ring", "max_bytes": 5}, {"algorithm": "ring"}]}',
            "must ascend",
        ),
        (
            '{"version": 1, "rules": [{"algorithm": "ring"}], "fusion_threshold_bytes": 0}',
            "fusion_threshold_bytes must be a positive whole number, not 0",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=message) as error:
        Plan.load(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"none.json: No such file"):
        Plan.load(tmp_path / "none.json")
