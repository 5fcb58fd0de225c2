"""Model definitions. One file serves all dense decoders; another is added only where the data flow differs."""
