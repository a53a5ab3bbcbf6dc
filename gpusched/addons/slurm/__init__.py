"""Slurm's commands: they parse, call the API that gsub and gq call, and print what Slurm's own would print.

    sbatch srun salloc squeue scancel scontrol sinfo sacct ...    one file per command
    command     options as getopt reads them, messages, exit codes, --help and --version
    format      `%` formats, `-O` fields, and the columns of sacct
    values      states, reasons, times, memory and ids as Slurm prints them

Like gsub and gq they import nothing heavy.
"""

ENTRY_POINTS = {
    "command.slurm-commands": "gpusched.addons.slurm.slurm_commands:app",
    "gq.format": "gpusched.addons.slurm.gq_format",
}
