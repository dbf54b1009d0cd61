"""The command line, `kvsieve`."""
