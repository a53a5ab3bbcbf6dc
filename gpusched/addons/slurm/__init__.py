"""Slurm's commands: they parse, call the API that gsub and gq call, and print what Slurm's own would print.

    sbatch srun salloc squeue scancel scontrol sinfo sacct ...    one file per command
    command     options as getopt reads them, messages, exit codes, --help and --version
    format      `%` formats, `-O` fields, and the columns of sacct
    values      states, reasons, times, memory and ids as Slurm prints them

Like gsub and gq they import nothing heavy.
"""

ENTRY_POINTS = {
    "engine.slurm": "gpusched.addons.slurm.engine.slurm_engine:open_engine",
    "settings.handover": "gpusched.addons.slurm.settings:HandoverSettings",
    "without_effect.handover": "gpusched.addons.slurm.checks:RULES",
    "visit.gpusched.cli.slurm.step_part": "gpusched.addons.slurm.part_server",
    "command.slurm-commands": "gpusched.addons.slurm.slurm_commands:app",
    "routes.slurm": "gpusched.addons.slurm.step_routes:ROUTES",
    "verb.BeginStep": "gpusched.addons.slurm.step_verbs:begin",
    "verb.EndStep": "gpusched.addons.slurm.step_verbs:end",
    "verb.CancelStep": "gpusched.addons.slurm.step_verbs:cancel",
    "gsub.explain": "gpusched.addons.slurm.explain:explain",
    "gq.format": "gpusched.addons.slurm.gq_format",
    "slurm.sbatch": "gpusched.addons.slurm.sbatch",
    "slurm.squeue": "gpusched.addons.slurm.squeue",
    "slurm.scancel": "gpusched.addons.slurm.scancel",
    "slurm.scontrol": "gpusched.addons.slurm.scontrol",
    "slurm.sinfo": "gpusched.addons.slurm.sinfo",
    "slurm.sacct": "gpusched.addons.slurm.sacct",
    "slurm.srun": "gpusched.addons.slurm.srun",
    "slurm.salloc": "gpusched.addons.slurm.salloc",
    "slurm.sacctmgr": "gpusched.addons.slurm.sacctmgr",
    "slurm.sprio": "gpusched.addons.slurm.sprio",
    "slurm.sshare": "gpusched.addons.slurm.sshare",
    "slurm.sstat": "gpusched.addons.slurm.sstat",
    "slurm.sdiag": "gpusched.addons.slurm.sdiag",
    "slurm.sattach": "gpusched.addons.slurm.sattach",
}
