#!/bin/bash
#SBATCH --job-name=jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-task=1
#SBATCH --time=10
# jax.distributed.initialize() takes everything from the variables of the step.
srun -l python3 train_jax.py
