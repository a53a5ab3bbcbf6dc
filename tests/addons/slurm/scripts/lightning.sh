#!/bin/bash -l
#SBATCH --job-name=lightning
#SBATCH --nodes=2             # as in Trainer(num_nodes=2)
#SBATCH --ntasks-per-node=2   # as in Trainer(devices=2)
#SBATCH --gres=gpu:2
#SBATCH --mem=0
#SBATCH --time=0-00:10:00
#SBATCH --signal=SIGUSR1@90
export NCCL_DEBUG=WARN
export PYTHONFAULTHANDLER=1
srun python3 train_lightning.py 2 2
