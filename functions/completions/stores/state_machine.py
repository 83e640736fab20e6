"""Batches as executions of the state machine in ``infra/batch.asl.json``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.batches import Batch, BatchStarter
from completions.domain.errors import BackendUnavailableError

if TYPE_CHECKING:
    from mypy_boto3_stepfunctions import SFNClient


class StateMachine(BatchStarter):
    """Needs ``states:StartExecution``. An execution is called as its batch, so that there is one of each."""

    def __init__(self, client: SFNClient, arn: str) -> None:
        self._client = client
        self._arn = arn

    def start(self, batch: Batch) -> None:
        text = json.dumps({"tenant": batch.tenant, "batch_id": batch.batch_id})
        try:
            self._client.start_execution(stateMachineArn=self._arn, name=batch.batch_id, input=text)
        except self._client.exceptions.ExecutionAlreadyExists:
            return
        except (ClientError, BotoCoreError) as error:
            code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
            raise BackendUnavailableError(
                "Batches cannot be started right now.", retry_after=1, detail=code or type(error).__name__
            ) from error
