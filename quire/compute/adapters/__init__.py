"""Adapters of a loaded model: read from folders, kept on the host, added to products for the rows they are of."""
