"""Linux facilities for the engine: processes, control groups, device rules, mounts, PAM, other users' rights."""
