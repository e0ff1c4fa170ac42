"""Exact resume of the order in which a run sees its data."""
