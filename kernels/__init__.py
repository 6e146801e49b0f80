"""What makes it fast on a device: integer linears, experts, CUDA graphs."""
