"""Files, streams and specs of the command line, with guards against hostile input. No torch."""
