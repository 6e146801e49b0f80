"""Layers that only some families have, and parts that all layers share."""
