"""From a sample to probabilities to scores."""
