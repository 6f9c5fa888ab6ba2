"""Arrays go in, a matplotlib figure comes out that belongs to no window."""
