"""HTTP glue, blind to dialects and containers."""
