#!/bin/bash
#SBATCH --job-name=farm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --gpus-per-node=2
#SBATCH --time=10
# Ten tasks, each on a GPU of its own: what finds none free waits for one.
for item in $(seq 10); do
    srun -N 1 -n 1 -c 1 --gpus=1 --exact bash -c \
        'echo "begin $0 $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_STEP_ID"; sleep 0.3
         echo "end $0 $SLURMD_NODENAME"' $item &
done
wait
