"""The shape of the registry table's items, and their translation to and from the domain.

One table, three kinds of item:

- ``KEY#<sha256>`` for each secret of an API key, or for the caller in the place of one: what a request reads.
- ``KEYS`` with the key's id as sort key: the same facts and the digests of its secrets, so that all keys are one query
  and a key is found without its secret. Both kinds are written in one transaction.
- ``MODEL`` with the id or an alias as sort key, so that all models are one query. An alias is a copy of the whole item
  under the other name: one read finds either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from completions.domain.catalog import Capability, ModelLimits, ModelPrice, ModelRoute, Parameter
from completions.domain.limits import KeyLimits
from completions.domain.metering import Principal

MODEL_PARTITION: Final = "MODEL"
KEY_SORT: Final = "KEY"
KEYS_PARTITION: Final = "KEYS"

Positive: TypeAlias = Annotated[int, Field(ge=1)]
NonNegative: TypeAlias = Annotated[int, Field(ge=0)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class RetiredSecret:
    """A secret that was replaced, and serves until ``until`` all the same."""

    sha256: str = field(repr=False)
    prefix: str | None
    until: datetime


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """An API key as its operator sees it. ``prefix`` is how its secret begins, ``sha256`` the secret's digest.

    A key with an ``arn`` has no secret: it is that caller's, who signs its requests, and the digest is the caller's.
    ``version`` grows with every change: a change is written only over the version it was made from.
    """

    principal: Principal
    sha256: str = field(repr=False)
    prefix: str | None = None
    created_at: datetime | None = None
    retired: tuple[RetiredSecret, ...] = ()
    version: int = 1
    arn: str | None = None

    def secrets(self) -> Iterator[tuple[str, str | None, Principal]]:
        """Digest, prefix and owner of each secret; a retired one's owner expires with it."""
        yield self.sha256, self.prefix, self.principal
        for one in self.retired:
            ends = min(one.until, self.principal.expires_at or one.until)
            yield one.sha256, one.prefix, replace(self.principal, expires_at=ends)


class KeyLimitsItem(BaseModel):
    """A key's limits, the fields of ``KeyLimits``."""

    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    parallel_requests: Positive | None = None
    tokens_per_day: Positive | None = None
    tokens_per_month: Positive | None = None
    nanos_per_day: Positive | None = None
    nanos_per_month: Positive | None = None


class KeyItem(BaseModel):
    """What the table keeps of an API key: never the key, only its digest in the partition key, and how it begins."""

    model_config = ConfigDict(extra="ignore")

    key_id: str
    prefix: str | None = None
    arn: str | None = None
    created_at: AwareDatetime | None = None
    owner: str
    team: str | None = None
    admin: bool = False
    allowed_models: list[str] | None = None
    limits: KeyLimitsItem = KeyLimitsItem()
    expires_at: AwareDatetime | None = None
    disabled: bool = False

    def to_principal(self) -> Principal:
        """The domain's view."""
        return Principal(
            key_id=self.key_id,
            owner=self.owner,
            team=self.team,
            admin=self.admin,
            allowed_models=None if self.allowed_models is None else frozenset(self.allowed_models),
            limits=KeyLimits(**self.limits.model_dump()),
            expires_at=self.expires_at,
            disabled=self.disabled,
        )

    @staticmethod
    def facts(principal: Principal) -> dict[str, Any]:
        """A principal's facts under the names they have here."""
        return {
            "key_id": principal.key_id,
            "owner": principal.owner,
            "team": principal.team,
            "admin": principal.admin,
            "allowed_models": None if principal.allowed_models is None else sorted(principal.allowed_models),
            "limits": asdict(principal.limits),
            "expires_at": principal.expires_at,
            "disabled": principal.disabled,
        }


class RetiredSecretItem(BaseModel, defer_build=True):
    """The fields of ``RetiredSecret``."""

    sha256: str
    prefix: str | None = None
    until: AwareDatetime


class KeyEntryItem(KeyItem, defer_build=True):
    """The fields of ``KeyEntry``."""

    sha256: str
    retired: list[RetiredSecretItem] = []
    version: NonNegative

    def to_entry(self) -> KeyEntry:
        """The operator's view."""
        return KeyEntry(
            principal=self.to_principal(),
            sha256=self.sha256,
            prefix=self.prefix,
            created_at=self.created_at,
            retired=tuple(RetiredSecret(one.sha256, one.prefix, one.until) for one in self.retired),
            version=self.version,
            arn=self.arn,
        )

    @classmethod
    def from_entry(cls, entry: KeyEntry) -> KeyEntryItem:
        """The table's view."""
        return cls(
            **KeyItem.facts(entry.principal),
            prefix=entry.prefix,
            created_at=entry.created_at,
            sha256=entry.sha256,
            retired=[RetiredSecretItem(**asdict(one)) for one in entry.retired],
            version=entry.version,
            arn=entry.arn,
        )


class PriceItem(BaseModel, defer_build=True):
    """Nano-dollars a token."""

    version: str
    input_nanos: NonNegative
    cached_input_nanos: NonNegative
    output_nanos: NonNegative


class LimitsItem(BaseModel, defer_build=True):
    """What one request may ask for."""

    output_tokens: Positive | None = None
    stops: NonNegative | None = None
    logprobs: NonNegative | None = None


class ModelItem(BaseModel):
    """One model; the fields are those of ``ModelRoute``."""

    model_config = ConfigDict(extra="ignore")

    model_id: str
    endpoint_name: str
    family: str
    context_length: Positive
    created: NonNegative
    owned_by: str = "organization"
    family_version: Annotated[str, Field(pattern=r"^\d+\.\d+(\.|$)")] | None = None
    aliases: list[str] = []
    served_model: str | None = None
    adapter: str | None = None
    inference_component: str | None = None
    target_variant: str | None = None
    custom_attributes: str | None = None
    document_start: str | None = None
    fim_family: str | None = None
    stop_tokens: list[str] = []
    asynchronous: bool = False
    limits: LimitsItem = LimitsItem()
    timeout_seconds: Seconds | None = None
    read_timeout_seconds: Seconds | None = None
    start_seconds: Positive = 300
    wait_for_start: bool = False
    isolate_prefix_cache: bool = True
    price: PriceItem | None = None
    fallbacks: list[str] = []
    capabilities: dict[Parameter, Capability] = {}

    def to_route(self) -> ModelRoute:
        """The domain's view."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        fields["aliases"] = tuple(self.aliases)
        fields["fallbacks"] = tuple(self.fallbacks)
        fields["stop_tokens"] = tuple(self.stop_tokens)
        fields["limits"] = ModelLimits(**self.limits.model_dump())
        fields["price"] = None if self.price is None else ModelPrice(**self.price.model_dump())
        return ModelRoute(**fields)

    @classmethod
    def from_route(cls, route: ModelRoute) -> ModelItem:
        """The table's view."""
        fields: dict[str, Any] = {name: getattr(route, name) for name in cls.model_fields}
        fields["limits"] = {name: getattr(route.limits, name) for name in LimitsItem.model_fields}
        if route.price is not None:
            fields["price"] = {name: getattr(route.price, name) for name in PriceItem.model_fields}
        return cls.model_validate(fields)


def key_partition(secret_sha256: str) -> str:
    """The partition key of an API key's item."""
    return f"KEY#{secret_sha256}"
