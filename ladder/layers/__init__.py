"""Layers that only some families have, and the parts that layers share."""
