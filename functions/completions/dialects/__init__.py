"""One module per public API dialect."""
