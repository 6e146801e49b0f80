"""What stands behind the scripts; docs/code.md is its map."""
