"""The web page and the files it is made of."""
