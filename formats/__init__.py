"""Other projects' checkpoints: what they call things, what they hold, and how ours becomes one."""
