#!/bin/bash
#SBATCH --job-name=ray
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-task=2
#SBATCH --time=00:10:00
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes_array=($nodes)
head_node=${nodes_array[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
port=6379
ip_head=$head_node_ip:$port
export ip_head
echo "Starting HEAD at $head_node"
srun --nodes=1 --ntasks=1 -w "$head_node" \
    ray start --head --node-ip-address="$head_node_ip" --port=$port \
    --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "$SLURM_GPUS_PER_TASK" --block &
worker_num=$((SLURM_JOB_NUM_NODES - 1))
srun -N $worker_num -n $worker_num --exclude="$head_node" \
    ray start --address "$ip_head" \
    --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "$SLURM_GPUS_PER_TASK" --block &
# The script's end ends both.
python3 -u train_ray.py "$ip_head" "$SLURM_JOB_NUM_NODES"
