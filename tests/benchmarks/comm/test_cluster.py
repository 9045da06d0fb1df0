"""What a failed job leaves on the emulated cluster."""

import psutil
import pytest

from benchmarks.comm.cluster import Cluster, ClusterError
from benchmarks.comm.network import missing, namespaces


@pytest.mark.slow("starts ranks in network namespaces")
@pytest.mark.cluster
def test_a_failed_job_is_reported_and_leaves_nothing_behind(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    job = tmp_path / "job.py"
    job.write_text(
        "import os, sys, time\n"
        "if os.environ['GROUP_RANK'] == '0':\n"
        "    time.sleep(300)\n"
        "sys.exit('this rank has had enough')\n"
    )

    def found():
        """Namespaces of this network, as other tests may create others; and ranks of the job."""
        own = [name for name in namespaces() if name.startswith(f"{cluster.network.name}-")]
        running = (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
        return len(own), sum(str(job) in command for command in running)

    with Cluster(nodes=2, ranks_per_node=1) as cluster:
        assert found() == (3, 0)
        with pytest.raises(ClusterError, match=r"^node 1 ended(.|\n)*had enough"):
            cluster.run([str(job)], timeout_seconds=60, grace_seconds=0.5)
        assert found() == (3, 0)
    assert found() == (0, 0)
