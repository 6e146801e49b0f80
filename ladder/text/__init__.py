"""Tokenizers, chat templates, and a chat on the terminal."""
