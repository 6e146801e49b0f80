"""From logits to tokens: sampling, and drafts that propose several tokens at once."""
