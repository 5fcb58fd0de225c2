"""How far attention and a whole model lie from float64: what is measured, and how it is told."""
