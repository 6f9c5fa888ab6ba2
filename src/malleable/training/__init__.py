"""One explicit loop and what it needs."""
