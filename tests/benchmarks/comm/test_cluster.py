"""What a failed job leaves on the emulated cluster."""

import os
from pathlib import Path

import pytest

from benchmarks.comm.cluster import Cluster, ClusterError
from benchmarks.comm.network import missing, namespaces

pytestmark = pytest.mark.slow("starts ranks in network namespaces")


@pytest.fixture
def possible():
    if reason := missing():
        pytest.skip(reason)


def processes(mark):
    """Running processes with ``mark`` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [pid for pid in found if pid != os.getpid()]


def namespaces_of(network):
    """The namespaces of one network; other tests may create others at the same time."""
    return [name for name in namespaces() if name.startswith(f"{network}-")]


@pytest.mark.cluster
@pytest.mark.usefixtures("possible")
def test_a_failed_job_is_reported_and_leaves_nothing_behind(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(
        "import os, sys, time\n"
        "if os.environ['GROUP_RANK'] == '0':\n"
        "    time.sleep(300)\n"
        "sys.exit('this rank has had enough')\n"
    )
    with Cluster(nodes=2, ranks_per_node=1) as cluster:
        assert len(namespaces_of(cluster.network.name)) == 3
        with pytest.raises(ClusterError, match=r"^node 1 ended(.|\n)*had enough"):
            cluster.run([str(job)], timeout_seconds=60, grace_seconds=0.5)
        assert not processes(str(job))
    assert not namespaces_of(cluster.network.name)
