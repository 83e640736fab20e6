"""The composition root of the function that starts batches. It starts without any model or dialect."""

from __future__ import annotations

from completions.clients import SystemClock, build_dynamodb_client, build_state_machine_client
from completions.pipelines.object_events import ObjectStarter
from completions.registry.dynamodb import DynamoRegistry
from completions.service.batch_inputs import BatchInputs
from completions.settings import SettingsError, read_pipeline_settings
from completions.stores.batch_table import BatchTable
from completions.stores.state_machine import StateMachine


def build_batch_starter() -> ObjectStarter:
    """Of this environment. Raises ``SettingsError``."""
    settings = read_pipeline_settings()
    if settings.batch_state_machine is None:
        raise SettingsError("environment: BATCH_STATE_MACHINE: without it no batch can be started")
    clock = SystemClock()
    dynamodb = build_dynamodb_client()
    table = BatchTable(dynamodb, settings.pipeline_table, settings.pipeline_retention_days, clock)
    starter = StateMachine(build_state_machine_client(), settings.batch_state_machine)
    registry = DynamoRegistry(dynamodb, settings.registry_table, clock, settings.registry_cache_seconds)
    return ObjectStarter(BatchInputs(table, table, starter, registry, clock), settings.pipeline_bucket)
