"""Jobs as files for other schedulers: an sbatch script or a Kubernetes Job from a submission, and a Job read back.

Only `gsub --print` and `gsub job.yaml` import it. What a target cannot say is in one table, `losses`.
"""

ENTRY_POINTS = {
    "gsub.print": "gpusched.addons.kubernetes.export",
    "gsub.manifest": "gpusched.addons.kubernetes.manifest_reader:read_job",
}
