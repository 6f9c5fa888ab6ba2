"""All that a run's folder holds."""
