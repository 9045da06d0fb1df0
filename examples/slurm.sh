#!/bin/bash
# ResNet-50 at batch 65,536 on a Slurm cluster: one torchrun per node, rendezvous on the first node.
#
#   sbatch examples/slurm.sh                                  # 8 nodes with 8 GPUs each
#   sbatch --nodes 2 examples/slurm.sh run_dir=/runs/other optimizer.lr=20   # other nodes and keys
#
# The run folder must be on storage shared by all nodes. torchrun restarts a failed rank, and Slurm
# requeues a job whose node fails; both resume from the last checkpoint. Shortly before the time
# limit, a signal stops the run with a checkpoint; sbatch the script again to resume on the same
# number of nodes, or with resume.reshard=true on another. Each rank is bound to the processor of its
# GPU by numactl, which the nodes must have.
#
# torchrun is taken from the environment in which sbatch is called; ENVIRONMENT names a virtual
# environment to use instead. With Pyxis, add to srun: --container-image=IMAGE
# --container-mounts=/data,/runs, where IMAGE was built by examples/Dockerfile.
#SBATCH --job-name=resnet50-b65536
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0 # all of the node's memory
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
if [ -n "${ENVIRONMENT:-}" ]; then PATH=$ENVIRONMENT/bin:$PATH; fi

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000)) # differs between jobs that share a node
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 # seconds for writing a checkpoint after a signal

# The one task of a node takes all of its processors.
srun --cpus-per-task="$SLURM_CPUS_ON_NODE" torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
  --rdzv-backend c10d --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID" \
  --max-restarts 3 --numa-binding=node \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m largebatch.recipes.train resnet50-b65536 \
  data.path=/data/imagenet run_dir=/runs/resnet50-b65536 resume=true "$@"
