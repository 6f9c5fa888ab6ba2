"""Runs are put beside each other here, and beside the paper."""
