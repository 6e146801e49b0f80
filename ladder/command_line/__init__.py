"""What scripts read from the command line, and what they report."""
