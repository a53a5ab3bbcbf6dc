#!/bin/bash
#SBATCH --job-name=trainer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1          # one launcher on each node
#SBATCH --cpus-per-task=4
#SBATCH --gres=gpu:2
#SBATCH --hint=nomultithread
#SBATCH --time 0:10:00
#SBATCH --output=%x-%j.out
set -eo pipefail
echo "START TIME: $(date)"
GPUS_PER_NODE=2
NNODES=$SLURM_NNODES
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
MASTER_PORT=6000
LAUNCHER="torchrun \
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank \$SLURM_PROCID \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT \
    --max_restarts 0 \
    "
# srun ends all tasks when one fails, and a node that hangs does not hold the others for ever.
SRUN_ARGS="--wait=60 --kill-on-bad-exit=1"
srun $SRUN_ARGS --jobid $SLURM_JOB_ID bash -c "$LAUNCHER train.py" 2>&1 | tee -a main-$SLURM_JOB_ID.log
echo "END TIME: $(date)"
