"""Glue between events and the service: batches, queues, buses. No HTTP, and no web framework."""
