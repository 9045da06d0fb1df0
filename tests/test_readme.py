"""The README tells what the benchmarks wrote."""

from benchmarks.tables import README, RESULTS, filled


def test_the_tables_are_the_newest_results():
    text = README.read_text()
    assert filled(text) == text


def test_every_result_is_told():
    for result in RESULTS.glob("*.md"):
        assert f"<!-- table {result.stem} -->" in README.read_text(), result
