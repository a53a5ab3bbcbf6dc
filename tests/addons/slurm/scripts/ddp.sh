#!/bin/bash
#SBATCH -J ddp
#SBATCH -N 2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH -c 2
#SBATCH -t 10
#SBATCH -o ddp-%j.out
# srun starts every process itself; the program reads its rank from Slurm's variables.
export MASTER_ADDR=$(scontrol show hostnames | head -n 1)
export MASTER_PORT=29511
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun --cpu-bind=none --kill-on-bad-exit=1 python3 -u train.py
