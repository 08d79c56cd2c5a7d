"""Device code: a folder is an operator, a file in it an architecture."""
