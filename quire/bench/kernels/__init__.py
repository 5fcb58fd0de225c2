"""`quire bench kernels`: every op and implementation against its reference, its limit, and its peers."""
