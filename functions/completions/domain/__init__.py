"""Frozen dataclasses, protocols and the error tree; standard library only."""
