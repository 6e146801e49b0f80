"""Chat templates, and a chat on the terminal."""
