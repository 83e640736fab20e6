"""Writes to the usage table, one method each, all of them conditional: repeating one changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.errors import (
    CompletionError,
    DuplicateRequestError,
    InvalidRequestError,
    LimitStatus,
    MeteringError,
    QuotaExceededError,
    RateLimitError,
)
from completions.domain.limits import LimitKind
from completions.domain.metering import Outcome, Reservation
from completions.dynamodb_json import deserialized, serialized
from completions.metering.items import RECORD_SORT, SettlementFields, partition, reserved_item
from completions.metering.limit_items import (
    CLOSED,
    LIMITS_SORT,
    OPEN,
    Hold,
    Result,
    amount,
    close_update,
    counter,
    fits,
    hold_update,
    limit_statuses,
    limits_partition,
)

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


class UsageTable:
    """Every method raises ``MeteringError`` when the table cannot be written."""

    def __init__(self, client: DynamoDBClient, name: str, retention_days: int) -> None:
        self._client = client
        self._name = name
        self._retention_days = retention_days

    def put_claim(self, reservation: Reservation, claim_id: str) -> None:
        """Raises ``DuplicateRequestError`` when the id is taken, ``InvalidRequestError`` by another request."""
        item = serialized(reserved_item(reservation, claim_id, self._retention_days))
        old = self._conditional(
            lambda: self._client.put_item(
                TableName=self._name,
                Item=item,
                ConditionExpression="attribute_not_exists(pk)",
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        )
        if isinstance(old, Refused) and old.item.get("claim_id") != claim_id:
            raise _duplicate(reservation, old.item)

    def drop_claim(self, reservation: Reservation, claim_id: str) -> None:
        """Take a claim back that came to nothing."""
        self._conditional(
            lambda: self._client.delete_item(
                TableName=self._name,
                Key=record_key(reservation.record_id),
                ConditionExpression="claim_id = :mine AND #state = :reserved",
                ExpressionAttributeNames={"#state": "state"},
                ExpressionAttributeValues={":mine": {"S": claim_id}, ":reserved": {"S": "RESERVED"}},
            )
        )

    def take_hold(self, reservation: Reservation, hold: Hold, forget: Sequence[str]) -> tuple[LimitStatus, ...]:
        """What the key has left. Raises ``RateLimitError``, ``QuotaExceededError`` or ``DuplicateRequestError``."""
        limits = reservation.principal.limits
        if not fits(limits, hold.estimate):  # a counter that is not there yet passes every condition
            raise _refusal(reservation, {})
        update = hold_update(limits, hold, forget)
        reply = self._conditional(
            lambda: self._client.update_item(
                TableName=self._name,
                Key=limits_key(reservation.principal.key_id),
                ReturnValues="UPDATED_NEW",
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
                **update,
            )
        )
        if not isinstance(reply, Refused):
            return limit_statuses(limits, deserialized(reply.get("Attributes", {})), hold.at)
        known = reply.item.get(OPEN + hold.record_id)
        if known is not None and known["claim"] == hold.claim_id:  # a retry after a lost reply
            return limit_statuses(limits, reply.item, hold.at)
        if known is not None or CLOSED + hold.record_id in reply.item:
            raise _duplicate(reservation, {})
        raise _refusal(reservation, reply.item)

    def settle_record(self, record_id: str, claim_id: str, settlement: SettlementFields) -> None:
        """Once: a record that is settled already stays as it is."""
        fields = serialized(settlement)
        names = {f"#{name}": name for name in (*fields, "state")}
        assignments = ", ".join(f"#{name} = :{name}" for name in fields)
        values = {f":{name}": value for name, value in fields.items()}
        old = self._conditional(
            lambda: self._client.update_item(
                TableName=self._name,
                Key=record_key(record_id),
                UpdateExpression=f"SET #state = :settled, {assignments}",
                ConditionExpression="#state = :reserved AND claim_id = :mine",
                ExpressionAttributeNames=names,
                ExpressionAttributeValues={
                    **values,
                    ":settled": {"S": "SETTLED"},
                    ":reserved": {"S": "RESERVED"},
                    ":mine": {"S": claim_id},
                },
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        )
        if isinstance(old, Refused) and not old.item:
            raise MeteringError("The usage could not be written.", detail="the claim is gone")

    def close_hold(self, key_id: str, hold: Hold, result: Result, now: datetime, *, keep: bool) -> None:
        """Once: a hold that is gone already stays gone."""
        update = close_update(hold, result, now, keep=keep)
        self._conditional(lambda: self._client.update_item(TableName=self._name, Key=limits_key(key_id), **update))

    def _conditional(self, write: Callable[[], Any]) -> Mapping[str, Any] | Refused:
        try:
            reply: Mapping[str, Any] = write()
        except ClientError as error:
            if _code(error) == "ConditionalCheckFailedException":
                return Refused(_old_item(error))
            raise _metering_error(error) from error
        except BotoCoreError as error:
            raise _metering_error(error) from error
        return reply


class Refused:
    """A condition did not hold. ``item`` is what stood there, in plain attributes, where it was asked for."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.item = deserialized(item)


def _duplicate(reservation: Reservation, known: Mapping[str, Any]) -> CompletionError:
    """What a repeated id is told: the class of the outcome it had. Answers are not stored, so none is given again."""
    fingerprint = known.get("fingerprint")
    if reservation.fingerprint is not None and fingerprint is not None and fingerprint != reservation.fingerprint:
        return InvalidRequestError(
            "This Idempotency-Key was used for another request; use a new one.", code="idempotency_key_reused"
        )
    outcome = known.get("outcome")
    if outcome is None:
        text = "A request with this id is in progress or was received before"
    elif outcome == Outcome.SUCCEEDED:
        text = "A request with this id was already answered and charged"
    else:
        text = f"A request with this id was already made, and ended as '{outcome}'"
    return DuplicateRequestError(f"{text}; it is not answered twice. Send it under a new id.", code="duplicate_request")


def _refusal(reservation: Reservation, item: Mapping[str, Any]) -> CompletionError:
    """The first limit that has no room for the estimate, in words."""
    limits, moment = reservation.principal.limits, reservation.created_at
    for status in limit_statuses(limits, item, moment):
        kind = LimitKind(status.name)
        wanted = amount(kind, reservation.estimate)
        if int(item.get(counter(kind, moment), 0)) + wanted <= status.limit:
            continue
        never = wanted > status.limit
        words = kind.value.replace("_", " ").replace("nanos", "nano-dollars")
        text = f"The key '{reservation.principal.key_id}' is limited to {status.limit:,} {words}; "
        if never:
            text += f"this request may take up to {wanted:,}, which can never fit."
        else:
            text += (
                f"{status.remaining:,} are left, and this request may take up to {wanted:,}. "
                f"The limit resets in {round(status.reset_seconds)} s."
            )
        kind_of_error = QuotaExceededError if kind.is_quota or never else RateLimitError
        return kind_of_error(text, retry_after=None if never else max(status.reset_seconds, 0.001), status=status)
    return MeteringError("The request could not be metered, so it was not served.", retry_after=1, detail="changed")


def record_key(record_id: str) -> dict[str, Any]:
    return {"pk": {"S": partition(record_id)}, "sk": {"S": RECORD_SORT}}


def limits_key(key_id: str) -> dict[str, Any]:
    return {"pk": {"S": limits_partition(key_id)}, "sk": {"S": LIMITS_SORT}}


def _old_item(error: ClientError) -> Mapping[str, Any]:
    """What ``ReturnValuesOnConditionCheckFailure`` brought back; botocore's types do not know of it."""
    response: Mapping[str, Any] = error.response
    item: Mapping[str, Any] = response.get("Item") or {}
    return item


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _metering_error(error: Exception) -> MeteringError:
    detail = _code(error) if isinstance(error, ClientError) else type(error).__name__
    return MeteringError("The request could not be metered, so it was not served.", retry_after=1, detail=detail)
