"""From prompts to logits to tokens."""
