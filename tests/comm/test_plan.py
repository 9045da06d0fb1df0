"""Plans choose a rule by message size, and are saved, loaded and checked."""

import json

import pytest

from largebatch.comm import Plan, PlanError, Rule


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
    for fusion in ({"segments": (300, 100)}, {"fusion_threshold_bytes": 123}):
        plan = Plan(rules, **fusion)
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["rules"][0] == {
        "algorithm": "hierarchical",
        "max_bytes": 4096,
        "wire_dtype": "fp16",
    }


def with_rules(*rules, **options):
    return json.dumps({"version": 1, "rules": rules, **options})


RING, TORUS = {"algorithm": "ring"}, {"algorithm": "torus"}
WITH_PHASES = "valid with: hierarchical, leader, torus"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "none.json: No such file"),
        ("nonsense", "Expecting value"),
        ("[]", "plan: not an object; valid: an object with keys version, rules, fusion"),
        ('{"rules": []}', "version: missing key in a plan; required: version, rules"),
        ('{"version": 2, "rules": []}', "version: unknown value 2; valid: 1"),
        ('{"version": 1, "rules": {}}', "rules: {} is not a list"),
        (with_rules(), "rules: the last rule must take any size"),
        (with_rules("ring"), "rule: not an object; valid: an object with keys algorithm"),
        (with_rules({"max_bytes": 5}), "algorithm: missing key in a rule"),
        (with_rules({"algorithm": "star"}), "algorithm: unknown value 'star'; valid: ring, hier"),
        (with_rules({"algorithm": []}), r"algorithm: unknown value \[\]; valid: ring"),
        (with_rules(RING | {"size": 5}), "size: unknown key in a rule; valid: algorithm, max_byt"),
        (with_rules(RING | {"wire_dtype": "fp8"}), "wire_dtype: unknown value 'fp8'"),
        (with_rules(TORUS | {"sum_dtype": "fp16"}), "sum_dtype: .* 'fp16'; valid: fp32, null"),
        (with_rules(RING | {"sum_dtype": "fp32"}), "sum_dtype: .*; valid with: hierarchical, tor"),
        (with_rules(RING | {"chunk_bytes": 96}), f"chunk_bytes: .* has no phases.*{WITH_PHASES}"),
        (with_rules(TORUS | {"chunk_bytes": 0}), "chunk_bytes: 0 is not a positive .*; valid: byt"),
        (with_rules(TORUS | {"shape": [4]}), r"shape: \[4\] is not a grid; valid: \[X, Y\], two"),
        (with_rules(RING | {"shape": [2, 4]}), "shape: algorithm ring has .*; valid with: torus"),
        (with_rules(RING | {"max_bytes": "1M"}), "max_bytes: '1M' is not a positive integer"),
        (with_rules(*[RING | {"max_bytes": 5}] * 2, RING), r"max_bytes: \[5, 5\] do not ascend"),
        *(
            (with_rules(RING, segments=wrong), "segments: .* is not a list of sizes")
            for wrong in ([], [5, 0], "all")
        ),
        (with_rules(RING, fusion_threshold_bytes=0), "fusion_threshold_bytes: 0 is not a positive"),
    ],
)
def test_an_invalid_file_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "none.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PlanError, match=message) as error:
        Plan.load(path)
    assert str(path) in str(error.value)
