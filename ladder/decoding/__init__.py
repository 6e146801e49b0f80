"""Batches of prompts, sampling, drafts, and scheduling ahead of the GPU."""
