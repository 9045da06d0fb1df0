"""The cost of a checkpoint: what is measured, and what the report makes of it."""

from benchmarks.recipes.checkpoint_cost import measure, report


def test_each_way_is_measured_in_turns(tmp_path):
    found = measure(tmp_path, 2, "test_resnet")
    assert {way: len(times) for way, times in found.items()} == {"ours": 2, "plain": 2, "verify": 2}
    assert all(time > 0 for times in found.values() for time in times)
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["step-00000001"]


def test_the_share_of_training_time_decides():
    text = report({"ours": [3.0, 2.0, 1.0], "plain": [1.0, 1.0, 1.0], "verify": [0.1] * 3})
    assert "| checkpoint, flushed and hashed | 2.00 (1.00 to 3.00) |" in text
    assert "median of 3 turns: 2.00." in text
    # 8 epochs take 4,100 s at 2,500 images per second, and 68 s at 150,000.
    assert "| 2,500 | 0.05% | met |" in text
    assert "| 150,000 | 2.93% | missed |" in text
