"""Each file here holds one verb of the command line."""
