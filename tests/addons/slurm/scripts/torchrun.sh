#!/bin/bash
#SBATCH --job-name=torchrun
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=00:10:00
# One torchrun on each node, which starts a process for each GPU.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000))
# Quoted: SLURM_NODEID is that of each task, not of this script.
srun bash -c 'torchrun --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" --nproc_per_node 2 \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" train.py'
