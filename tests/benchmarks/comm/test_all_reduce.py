"""The all-reduce benchmark uses DDP's buckets and counts turns and repeats correctly."""

import pytest
import timm
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm.all_reduce import floor_seconds, goals, race_seconds, races, summary
from benchmarks.comm.all_reduce_rank import Contender, bucket_sizes, gradient_sizes, next_of
from largebatch.comm import Plan, Rule
from largebatch.comm.tuning.final import Final, Finalist, to_json
from largebatch.comm.tuning.verdict import Ratio
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("measures on ranks")


def real_buckets(*every_options):
    return [buckets(options) for options in every_options]


def buckets(options):
    """Elements of DDP's buckets in the second step, after DDP has rebuilt them."""
    model = DistributedDataParallel(timm.create_model("resnet50"), **options)
    seen = []

    def keep(state, bucket):
        seen.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, keep)
    for _ in range(2):
        seen.clear()
        model(torch.zeros(2, 3, 32, 32)).sum().backward()
    return seen


def test_buckets_are_those_of_ddp():
    assert len(gradient_sizes()) == 161
    ((default, smaller),) = run_ranks(1, real_buckets, {}, {"bucket_cap_mb": 4})
    assert bucket_sizes([dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20]) == default
    assert bucket_sizes([4 * 2**20]) == smaller


def repeat(seconds, rejected=False):
    return {"seconds": seconds, "rejected": rejected, "processor_seconds": 1.0}


def test_every_contender_has_turns_in_proportion_to_its_weight():
    entrants = [Contender("a", print, 3), Contender("b", print), Contender("c", print)]
    order = []
    left = 12.0
    while (turn := next_of(entrants, left)) is not None:
        entrants[turn].repeats.append(repeat(1.0))
        order.append(entrants[turn].name)
        left -= 1.0
    assert order[:3] == ["a", "b", "c"]
    assert [order.count(name) for name in "abc"] == [7, 2, 2]
    # Even without time left, each contender runs once.
    entrants[1].repeats.clear()
    assert next_of(entrants, -1.0) == 1


def test_rejected_repeats_are_used_only_if_there_are_no_others():
    found = summary([repeat(2.0), repeat(9.0, True), repeat(4.0)])
    assert (found["median_seconds"], found["repeats"], found["rejected"]) == (3.0, 2, 1)
    assert (found["most_seconds"], found["disturbed"]) == (4.0, False)
    found = summary([repeat(8.0, True), repeat(9.0, True)])
    assert (found["median_seconds"], found["repeats"], found["disturbed"]) == (8.5, 0, True)


@pytest.mark.parametrize(("plan", "met"), [(1.4, True), (1.6, False)])
def test_goals_are_met_or_missed(plan, met):
    seconds = {"DDP default": 2.0, "plan, fused": plan, "plan, fused, fp16": 0.5 * plan}
    case = {
        "nodes": 2,
        "ranks_per_node": 4,
        "mbit": 200.0,
        "floor_seconds": 1.2,
        "contenders": {name: {"median_seconds": s} for name, s in seconds.items()},
    }
    reached = {goal["goal"]: goal["met"] for goal in goals([case])}
    assert reached == {
        "DDP default / plan": met,
        "plan / DDP default": True,
        "plan / floor": met,
        "plan in FP16 / plan": True,
    }


def test_races_are_shown_where_there_was_one():
    final = Final(
        (
            Finalist(Plan.single(), (2.0, 2.2, 2.1), Ratio(2.1, 1.5, 2.9)),
            Finalist(Plan((Rule("leader"),)), (1.0, 1.1, 1.0), Ratio(1.0, 1.0, 1.0)),
        ),
        winner=1,
        settled=True,
        backward_seconds=0.2,
    )
    case = {"nodes": 2, "ranks_per_node": 4, "mbit": 200.0}
    shown = races([{**case, "race": None}, {**case, "race": to_json(final)}])
    assert shown.startswith("2 × 4, 200 Mbit/s:\n\n```text\n")
    assert "* leader, buckets of 25 MiB: 1 s in 3 rounds, fastest" in shown
    assert races([{**case, "race": None}]) == ""


def test_the_race_has_time_for_six_rounds_of_four_plans():
    slow = race_seconds(4, 200.0)
    assert slow >= 6 * 4 * 1.2 * floor_seconds(4, 102_228_128, 200e6 / 8)
    assert race_seconds(2, 1000.0) == 60.0
