"""Runs beside each other, and beside the paper."""
