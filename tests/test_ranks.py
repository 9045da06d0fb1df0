"""How tests start ranks."""

from tests.ranks import torchrun

SCRIPT = """
import os
from pathlib import Path

status = dict(line.split(":", 1) for line in Path(f"/proc/{os.getppid()}/status").open())
print(os.environ["RANK"], "was forked from a process with threads:", int(status["Threads"]))
"""


def test_ranks_are_forked_from_a_process_with_one_thread(tmp_path):
    # A lock that another thread holds at this moment would never be released in the rank.
    (tmp_path / "job.py").write_text(SCRIPT)
    out = tmp_path / "out"
    job = torchrun(tmp_path / "job.py", [], out, ranks=2)
    job.join(120)
    assert job.exitcode == 0, out.read_text()
    said = [line for line in out.read_text().splitlines() if "forked" in line]
    assert sorted(said) == [f"{n} was forked from a process with threads: 1" for n in range(2)]
