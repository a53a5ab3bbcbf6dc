#!/bin/bash
#SBATCH --job-name=mpi
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --time=10
# No -n and no hostfile: both are the allocation's.
mpirun python3 train_mpi.py
