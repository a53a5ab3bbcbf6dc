#!/bin/bash
#SBATCH --job-name=c10d
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --gpus-per-task=2
#SBATCH --cpus-per-task=4
#SBATCH --time=00:10:00
# The agents agree on their ranks themselves, at an address of the first node.
nodes=( $(scontrol show hostnames $SLURM_JOB_NODELIST) )
head_node=${nodes[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
echo "head: $head_node at $head_node_ip"
export LOGLEVEL=INFO
srun torchrun \
    --nnodes 2 \
    --nproc_per_node gpu \
    --rdzv_id $SLURM_JOB_ID \
    --rdzv_backend c10d \
    --rdzv_endpoint $head_node_ip:29500 \
    train.py
