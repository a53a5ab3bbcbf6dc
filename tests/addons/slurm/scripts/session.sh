#!/bin/bash
# Typed in the shell that `salloc -N 2 --ntasks-per-node=2 --gpus-per-node=2` opens.
echo "nodes: $SLURM_JOB_NODELIST, $SLURM_NNODES"
echo "names:" $(scontrol show hostnames)
echo "folded: $(scontrol show hostlist $(scontrol show hostnames | paste -sd,))"
srun -l hostname | sort -n
MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29533 srun python3 train.py
srun -N 1 -n 1 -w "$(scontrol show hostnames | tail -n 1)" bash -c 'echo "alone on $(hostname) as $SLURM_PROCID of $SLURM_NTASKS"'
exit 5
