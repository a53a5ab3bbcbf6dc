"""What is attached to the scheduler: each folder can be left out, and the rest works without it."""
