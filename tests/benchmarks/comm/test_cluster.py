"""The emulated cluster has links of the requested rate and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.comm import cluster as cluster_module
from benchmarks.comm.cluster import Cluster, ClusterError, main
from benchmarks.comm.network import Network, NetworkError, missing, namespaces

pytestmark = pytest.mark.slow("starts ranks in network namespaces")

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


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


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.cluster
@pytest.mark.usefixtures("possible")
def test_each_algorithm_sends_the_stated_bytes_between_nodes():
    with Cluster(nodes=2, ranks_per_node=2, mbit=1000) as cluster:
        job = [str(ROOT / "tests/comm/links.py")]
        outputs = cluster.run(job, environment=ENVIRONMENT, timeout_seconds=120)
    line = next(line for line in outputs[0].splitlines() if line.startswith("LINKS "))
    result = json.loads(line.removeprefix("LINKS "))
    assert result["nodes"] == [[0, 1], [2, 3]]  # in the order of the nodes
    assert {"ring", "hierarchical"} <= set(result["rows"][0])
    for name, row in result["rows"][0].items():
        sent = [node[name]["sent"] for node in result["rows"]]
        # Headers are at most 1 %, and control messages are negligible beside 6 MB.
        assert sum(sent) == pytest.approx(row["stated_of_all"], rel=0.03), name
        assert max(sent) <= 1.03 * row["stated"], name


@pytest.mark.cluster
@pytest.mark.usefixtures("possible")
def test_links_have_the_requested_rate_in_both_directions():
    with Network(3, mbit=100) as network, Network(2) as other:
        assert not {network.namespace(0), network.namespace(1)} & {other.namespace(0)}
        for mbit in (100, 20):
            network.shape(mbit)
            # 1448 of a frame's 1514 bytes are data, and acknowledgements share the link.
            least, most = 0.85 * mbit, 1.0 * mbit
            best = [0.0] * 3
            for _ in range(6):  # other load only lowers the rate
                before = network.link_bytes()
                rates = [rate * 8e-6 for rate in network.link_rates(0.6)]
                crossed = [new - old for new, old in zip(network.link_bytes(), before, strict=True)]
                best = [max(pair) for pair in zip(best, rates, strict=True)]
                assert max(best) <= most
                if min(best) >= least:
                    break
            assert min(best) >= least
            # What one node sends another receives: the data and a small surplus.
            sent, received = sum(c.sent for c in crossed), sum(c.received for c in crossed)
            assert sent == pytest.approx(received, rel=0.2)  # some bytes wait at the switch
            assert min(sent, received) >= 3 * 0.4 * least * 1e6 / 8
        network.shape(None)
        assert min(network.link_rates(0.4)) * 8e-6 > 200


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
        with pytest.raises(ClusterError, match=r"^node 0 had not ended in 0.1 s"):
            cluster.run([str(job)], timeout_seconds=0.1)
        assert not processes(str(job))
    assert not namespaces_of(cluster.network.name)


@pytest.mark.cluster
@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind_after_a_signal(number, tmp_path):
    job = tmp_path / "job.py"
    job.write_text("import time\nprint('it runs', flush=True)\ntime.sleep(300)\n")
    command = [
        sys.executable,
        "-m",
        "benchmarks.comm.cluster",
        "--nodes",
        "1",
        "--ranks-per-node",
        "1",
    ]
    command += ["--", str(job)]
    shell = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        # A shell makes its background jobs ignore SIGINT, including these tests and their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert "it runs" in shell.stdout.readline()
        rank = processes(str(job))[-1]
        where = subprocess.check_output(["ip", "netns", "identify", str(rank)], text=True)
        network = where.strip().removesuffix("-0")
        assert namespaces_of(network)
        shell.send_signal(number)
        code = shell.wait(30)
    finally:
        shell.kill()
        shell.stdout.close()
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    assert wait_for(lambda: not processes(str(job)))
    if number == signal.SIGKILL:
        with Network(1):  # removes what the killed process could not
            pass
    assert not namespaces_of(network)


def test_an_impossible_cluster_is_refused_in_one_line(monkeypatch, capsys):
    with pytest.raises(NetworkError, match="nodes: 0 is out of range; valid: 1 to 150"):
        Cluster(nodes=0, ranks_per_node=1)
    with pytest.raises(NetworkError, match="ranks_per_node: 0 is out of range; valid: 1 or more"):
        Cluster(nodes=1, ranks_per_node=0)
    with pytest.raises(NetworkError, match="mbit: 0 is out of range; valid: 1 to 30000"):
        Cluster(nodes=1, ranks_per_node=1, mbit=0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["cluster", "--", "job.py"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error == "cannot create a cluster: network namespaces need root\n"
    assert cluster_module.missing() == "network namespaces need root"
