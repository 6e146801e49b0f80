"""Research on quality: what wirings cost."""
