"""Adapters of a loaded model: read from folders, kept on the host, and added to its products for the rows they are of."""
