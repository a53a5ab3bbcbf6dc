#!/bin/bash
#SBATCH --job-name=resumes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --time=00:01:00
#SBATCH --signal=SIGUSR1@56   # to the tasks of all nodes, so long before the time limit
#SBATCH --requeue
#SBATCH --open-mode=append
srun python3 train_until_signal.py 2 2
