"""Files and batches: the endpoints, the folder they are kept in, and the worker that runs them."""
