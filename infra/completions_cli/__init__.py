"""Operator and developer commands of the completions gateway."""
