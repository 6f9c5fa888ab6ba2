"""Arrays in, a matplotlib figure out."""
