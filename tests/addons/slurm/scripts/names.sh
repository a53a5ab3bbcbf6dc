#!/bin/bash
#SBATCH -N 2 --ntasks-per-node=1 --gpus-per-node=1 -t 5
# What scripts ask about their nodes, in the batch script and in steps.
echo "$SLURM_JOB_NODELIST $SLURM_NODELIST $SLURM_NNODES $SLURM_JOB_NUM_NODES $SLURM_TASKS_PER_NODE $SLURM_NTASKS"
echo $(scontrol show hostnames)/$(scontrol show hostnames $SLURM_JOB_NODELIST)/$(scontrol show hostnames 'n[2,1]')
echo $(scontrol show hostlist n2,n1)/$(scontrol show hostlistsorted n2,n1)
scontrol show job -d $SLURM_JOB_ID -o
squeue --json -j $SLURM_JOB_ID > queue.json
squeue -h -j $SLURM_JOB_ID -o '%N %B %D %C'
srun -n 2 -l bash -c 'echo $(scontrol show hostnames) $SLURM_STEP_NODELIST $SLURM_JOB_NODELIST' | sort
srun -N 1 -n 1 -w n2 bash -c 'echo alone: $(scontrol show hostnames) $SLURM_STEP_NODELIST $SLURM_NNODES $SLURM_JOB_NUM_NODES'
