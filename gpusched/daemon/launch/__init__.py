"""From a job and its placement to what an engine can start."""
