"""Steps come back from a level to the root: found, fetched, verified, put in their place."""
