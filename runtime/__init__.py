"""What the scripts share: how a run starts and ends, the terminal, outputs that are complete or absent."""
