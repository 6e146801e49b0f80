"""What a checkpoint is converted from: source.py has the protocol and the table of forms, each of which has a file."""
