"""What makes it fast on a device: integer linears, and C++ for CPUs."""
