"""The Slurm script and the Kubernetes manifest are valid and consistent, and the script trains."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from largebatch.recipes.mlperf.log import RESULT
from largebatch.recipes.schema.load import load
from tests.ranks import free_ports
from tests.recipes.runs import BASE

ROOT = Path(__file__).parents[2]
SLURM, JOB = ROOT / "examples" / "slurm.sh", ROOT / "examples" / "pytorchjob.yaml"
TRAINER = ["-m", "largebatch.recipes.train"]

# Stand-ins for Slurm's commands: srun starts a process per node on this machine and waits for all.
FAKES = {
    "scontrol": '[ "$*" = "show hostnames node[1-2]" ] && printf "localhost\\nnode2\\n"',
    "srun": """
        printf '%s\\n' "$@" > "$FAKE_SLURM/command"
        shift  # its own option
        for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & nodes="$nodes $!"; done
        for node in $nodes; do wait "$node" || exit; done""",
    # without --numa-binding, which needs a GPU
    "torchrun": f"""
        for word; do [[ $word = --numa-binding=* ]] || words+=("$word"); done
        exec {shlex.quote(sys.executable)} -m torch.distributed.run "${{words[@]}}\"""",
}
NODES, PROCESSES = 2, 1

# Overrides that train the recipe on a few random images for two updates.
SMALL = [
    *(*BASE, "data.source=synthetic", "data.train_images=64", "data.val_images=16"),
    *("data.classes=4", "stop_after=2", "optimizer.momentum=0.9", "schedule.decay=null"),
    *("evaluate_every=4ep", "track=mlperf"),
]


def slurm(folder, job_id, *overrides):
    """Run the script with stand-ins for Slurm's commands; return the result and srun's command."""
    (folder / "bin").mkdir()
    for name, body in FAKES.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    result = subprocess.run(
        ["bash", str(SLURM), *overrides],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "FAKE_SLURM": str(folder),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": str(job_id),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": str(NODES),
            "SLURM_GPUS_ON_NODE": str(PROCESSES),
            "SLURM_CPUS_ON_NODE": "2",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    command = (folder / "command").read_text().splitlines()
    return result, command


@pytest.mark.slow("trains under two torchruns")
def test_the_script_trains_on_two_nodes(tmp_path):
    run = tmp_path / "run"
    (port,) = free_ports(1, 20_000, 30_000)
    job_id = port - 20_000  # the port follows from it
    result, command = slurm(tmp_path, job_id, f"run_dir={run}", *SMALL)
    assert result.returncode == 0, result.stderr
    assert command[:2] == ["--cpus-per-task=2", "torchrun"]
    for name, value in {
        "--nnodes": "2",
        "--nproc-per-node": "1",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"localhost:{port}",
        "--rdzv-id": str(job_id),
    }.items():
        assert command[command.index(name) + 1] == value
    assert "--numa-binding=node" in command
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["world_size"], summary["micro_batch_size"]) == (2, 4)
    log = run / RESULT
    events = [json.loads(x.removeprefix(":::MLLOG ")) for x in log.read_text().splitlines()]
    values = {event["key"]: event["value"] for event in events}
    assert len([e for e in events if e["key"] == "run_start"]) == 1  # only one rank writes
    assert values["gradient_accumulation_steps"] == 2
    assert values["submission_platform"].startswith("2x1 ")


def test_the_job_has_valid_pods_and_runs_the_command_of_the_script_on_the_same_resources():
    spec, script = yaml.safe_load(JOB.read_text())["spec"], SLURM.read_text()
    template = spec["pytorchReplicaSpecs"]["Worker"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker"}, **template}
    kubernetes_validate.validate(pod, "1.30", strict=True)
    (container,) = template["spec"]["containers"]
    signals = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    assert container["command"][:5] == ["torchrun", "--numa-binding=node", signals, *TRAINER]
    lines = script.replace("\\\n", " ").splitlines()
    (words,) = [shlex.split(line) for line in lines if line.startswith("srun")]
    assert signals in words
    assert words[words.index("-m") : words.index("$@")] == container["command"][3:]
    assert f"#SBATCH --nodes={spec['pytorchReplicaSpecs']['Worker']['replicas']}\n" in script
    assert f"#SBATCH --gpus-per-node={spec['nprocPerNode']}\n" in script
    assert f"--max-restarts {spec['elasticPolicy']['maxRestarts']} " in script
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == spec["nprocPerNode"]
    name, *overrides = container["command"][5:]
    recipe = load(name, overrides).recipe
    assert recipe.resume.from_ == "latest"
    assert recipe.batch_size % (64 * recipe.micro_batch_size) == 0  # on 8 x 8 GPUs


def test_shellcheck_finds_nothing_in_the_script():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([shellcheck, SLURM], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
