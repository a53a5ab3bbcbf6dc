#!/bin/bash
#SBATCH --job-name=deepspeed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
# A hostfile from the allocation; DeepSpeed then types srun.
hostfile=hostfile-$SLURM_JOB_ID
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    echo "$node slots=$SLURM_NTASKS_PER_NODE"
done > "$hostfile"
deepspeed --launcher slurm --hostfile "$hostfile" --master_port $((15000 + SLURM_JOB_ID % 10000)) train.py
code=$?
rm "$hostfile"
exit $code
