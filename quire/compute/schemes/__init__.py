"""Weight schemes: what a matrix is stored as, how it is cut for a rank, and what finishing makes of it."""
