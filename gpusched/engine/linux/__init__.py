"""What the engine uses of Linux: processes, control groups, device rules, mounts, PAM, other users' rights."""
