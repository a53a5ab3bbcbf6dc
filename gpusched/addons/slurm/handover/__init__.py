"""Jobs for other schedulers: what these can hold of a job, a job as `#SBATCH` lines, and the script that Slurm gets.

`gsub --print` prints with it what a user submits; the daemon hands jobs over with the same mapping.
"""
