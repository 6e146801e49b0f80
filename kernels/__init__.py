"""What makes it fast on a device: integer linears, CUDA graphs."""
