"""Hand-over of whole jobs to the site's Slurm.

slurm_engine   the engine: which run is which job of Slurm, what is still to be done about it, events
commands       sbatch, squeue, scancel, sacct and scontrol as child processes with a deadline, as the run's user
answers        what they say, and what became of a run according to that
"""
