"""Measures what communication costs, and predicts what it would cost over other links."""
