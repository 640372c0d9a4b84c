"""Copies of checkpoints in other tiers: replication, repair and fetching (DESIGN part 10)."""
