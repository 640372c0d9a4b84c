"""Saves and restores as Prometheus metrics: what is counted, how it is written, and a file of it."""
