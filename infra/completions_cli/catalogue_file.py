"""The catalogue file's own shape: friendly keys, US dollars, dates. ``ModelRoute`` is what becomes of an entry."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any, Final, TypeAlias

from annotated_types import Ge, Gt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from completions.backends.families import CODECS
from completions.domain.catalog import Capability, ModelLimits, ModelPrice, ModelRoute, Parameter
from completions.service.infill import TEMPLATES

_NANOS_PER_DOLLAR: Final = 1_000_000_000
_PRICED_TOKENS: Final = 1_000_000
_NANOS: Final = _NANOS_PER_DOLLAR // _PRICED_TOKENS
"""Nano-dollars a token in one dollar per million tokens."""
_MAX_NAME_BYTES: Final = 1024
_MAX_NANOS: Final = 10**15
_DAY: Final = 86_400


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("catalogue", "{message}", {"message": message})


def _name(value: str) -> str:
    if len(value.encode()) > _MAX_NAME_BYTES:
        raise _wrong(f"is longer than {_MAX_NAME_BYTES} bytes, which is what a key of the table may have")
    if not value.isprintable() or value != value.strip():
        raise _wrong("must be printable characters, without a blank at either end")
    return value


def _visible(value: str) -> str:
    if not (value.isascii() and value.isprintable() and value == value.strip()):
        raise _wrong("must be visible ASCII characters: it travels in a header")
    return value


def _family(value: str) -> str:
    if value not in CODECS:
        raise _wrong(f"there is no family '{value}'; there are {', '.join(sorted(CODECS))}")
    return value


def _fim_family(value: str) -> str:
    if value not in TEMPLATES:
        raise _wrong(f"there is no infill family '{value}'; there are {', '.join(sorted(TEMPLATES))}")
    return value


def _version(value: object) -> object:
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        raise _wrong(f'must stand in quotes ("{value}"), or YAML reads a number')
    return value


def _seconds(value: object) -> object:
    """Fractions arrive as ``Decimal``."""
    return float(value) if isinstance(value, Decimal) else value


def _moment(value: object) -> object:
    """A day as its first second in UTC."""
    if isinstance(value, str):
        try:
            value = date.fromisoformat(value)
        except ValueError:
            raise _wrong("must be a day such as 2026-11-30, or Unix seconds") from None
    if isinstance(value, datetime):
        raise _wrong("must be a day without a time, or Unix seconds")
    if isinstance(value, date):
        return int(datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp())
    return value


def _dollars(value: object) -> object:
    """Nano-dollars a token, exactly."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise _wrong("must be a number of US dollars")
    if isinstance(value, Decimal) and not value.is_finite():
        raise _wrong("must be a number of US dollars")
    if value < 0:
        raise _wrong("must not be negative")
    if value > _MAX_NANOS // _NANOS:
        raise _wrong(f"must not exceed {_MAX_NANOS // _NANOS} dollars")
    nanos = value * _NANOS
    if nanos != int(nanos):
        raise _wrong("has more than three decimals: the smallest price is 0.001, a nano-dollar a token")
    return int(nanos)


_AWS_PATTERN: Final = r"^[A-Za-z0-9](-*[A-Za-z0-9])*$"
Name: TypeAlias = Annotated[str, StringConstraints(min_length=1), AfterValidator(_name)]
AwsName: TypeAlias = Annotated[str, StringConstraints(max_length=63, pattern=_AWS_PATTERN)]
Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Visible: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(_visible)]
Seconds: TypeAlias = Annotated[float, BeforeValidator(_seconds), Gt(0), Field(allow_inf_nan=False)]
Dollars: TypeAlias = Annotated[
    int, BeforeValidator(_dollars), WithJsonSchema({"type": "number", "minimum": 0, "maximum": _MAX_NANOS // _NANOS})
]
Moment: TypeAlias = Annotated[
    int,
    BeforeValidator(_moment),
    Ge(0),
    WithJsonSchema({"anyOf": [{"type": "string", "format": "date"}, {"type": "integer", "minimum": 0}]}),
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class PriceEntry(_Strict):
    """US dollars per million tokens, with at most three decimals."""

    version: Text
    """Recorded with every charge; change it with the price, so that an old bill can be explained."""
    input_dollars_per_million: Dollars
    """For a million prompt tokens."""
    cached_input_dollars_per_million: Dollars | None = None
    """For a million prompt tokens that the container's prefix cache held; as for all others unless given."""
    output_dollars_per_million: Dollars
    """For a million generated tokens."""


class LimitsEntry(_Strict):
    """What one request may ask for, where that is less than the container allows."""

    output_tokens: Annotated[int, Ge(1)] | None = None
    """The most tokens to generate."""
    stops: Annotated[int, Ge(0)] | None = None
    """The most stop texts the container is told; the service looks for all others itself."""
    logprobs: Annotated[int, Ge(0)] | None = None
    """The most alternatives named for each token."""


class ModelEntry(_Strict):
    """A model, and the SageMaker endpoint that serves it."""

    id: Name
    """What callers write as the model; at most 1024 bytes."""
    aliases: list[Name] = []
    """Other names of the same model."""
    endpoint: AwsName
    """The SageMaker endpoint's name."""
    inference_component: AwsName | None = None
    """The inference component on the endpoint, an adapter's own one included."""
    target_variant: AwsName | None = None
    """The production variant to ask, where the endpoint's weights should not decide."""
    adapter: Text | None = None
    """The LoRA adapter, as the container calls it."""
    served_model: Text | None = None
    """The model name that the container wants to read in the request."""
    family: Annotated[str, AfterValidator(_family), Field(json_schema_extra={"enum": sorted(CODECS)})]
    """The wire format of the container."""
    family_version: (
        Annotated[str, BeforeValidator(_version), StringConstraints(pattern=r"^\d+\.\d+(\.[0-9A-Za-z.+-]+)?$")] | None
    ) = None
    """The container's own version, in quotes; it is taken for a new one unless given."""
    context_length: Annotated[int, Ge(1)]
    """Tokens of prompt and answer together."""
    owned_by: Text = "organization"
    """What the list of models says about the owner."""
    created: Moment
    """When the model came to be: a day, or Unix seconds."""
    limits: LimitsEntry = LimitsEntry()
    fim_family: (
        Annotated[str, AfterValidator(_fim_family), Field(json_schema_extra={"enum": sorted(TEMPLATES)})] | None
    ) = None
    """Whose markers the model knows for filling in the middle."""
    stop_tokens: list[Text] = []
    """Texts that end every answer and never stand in it."""
    document_start: Text | None = None
    """What an empty prompt becomes."""
    custom_attributes: Visible | None = None
    """SageMaker's attributes header, such as ``accept_eula=true``."""
    asynchronous: bool = False
    """Whether it is an asynchronous endpoint."""
    timeout_seconds: Seconds | None = None
    """Bounds a whole answer."""
    read_timeout_seconds: Seconds | None = None
    """Bounds one wait for the container."""
    start_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    """How long the model takes to start when it is scaled to zero."""
    wait_for_start: bool = False
    """Whether callers wait for that, instead of being told to come back."""
    isolate_prefix_cache: bool = True
    """Whether tenants are kept from sharing the container's prefix cache."""
    price: PriceEntry | None = None
    fallbacks: list[Name] = []
    """Ids of models to ask when this one is not there, in order."""
    capabilities: dict[Annotated[Parameter, Strict(False)], Annotated[Capability, Strict(False)]] = {}
    """Where this endpoint differs from its family."""

    def to_route(self) -> ModelRoute:
        """The registry's view."""
        fields: dict[str, Any] = {_ROUTE_NAMES.get(name, name): getattr(self, name) for name in _ENTRY_NAMES}
        for name in ("aliases", "fallbacks", "stop_tokens"):
            fields[name] = tuple(fields[name])
        fields["limits"] = ModelLimits(**self.limits.model_dump())
        fields["price"] = None if self.price is None else _model_price(self.price)
        return ModelRoute(**fields)


class CatalogueFile(_Strict):
    """Every model the service offers."""

    models: list[ModelEntry]


_ENTRY_NAMES: Final = tuple(ModelEntry.model_fields)
_ROUTE_NAMES: Final = {"id": "model_id", "endpoint": "endpoint_name"}


def entry_values(route: ModelRoute) -> dict[str, Any]:
    """Every key of the entry that says ``route``, defaults included, in JSON's types."""
    values: dict[str, Any] = {name: getattr(route, _ROUTE_NAMES.get(name, name)) for name in _ENTRY_NAMES}
    for name in ("aliases", "fallbacks", "stop_tokens"):
        values[name] = list(values[name])
    if route.created % _DAY == 0:
        values["created"] = datetime.fromtimestamp(route.created, UTC).date().isoformat()
    limits = {name: getattr(route.limits, name) for name in LimitsEntry.model_fields}
    values["limits"] = {name: value for name, value in limits.items() if value is not None}
    values["price"] = None if route.price is None else _price_values(route.price)
    values["capabilities"] = {str(name): str(value) for name, value in sorted(route.capabilities.items())}
    return values


def brief_values(route: ModelRoute) -> dict[str, Any]:
    """``entry_values`` without what would be the same if it were left out."""
    plain = ModelRoute(route.model_id, route.endpoint_name, route.family, route.context_length, route.created)
    defaults = entry_values(plain)
    required = {name for name, field in ModelEntry.model_fields.items() if field.is_required()}
    return {name: value for name, value in entry_values(route).items() if name in required or value != defaults[name]}


def dollars(nanos: int) -> str:
    """Nano-dollars a token as dollars per million tokens, with at least two decimals."""
    text = f"{Decimal(nanos) / _NANOS:.3f}"
    return text.removesuffix("0")


def schema_text() -> str:
    """The file's JSON Schema, as it is committed."""
    schema = CatalogueFile.model_json_schema()
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def _model_price(price: PriceEntry) -> ModelPrice:
    cached = price.cached_input_dollars_per_million
    return ModelPrice(
        version=price.version,
        input_nanos=price.input_dollars_per_million,
        cached_input_nanos=price.input_dollars_per_million if cached is None else cached,
        output_nanos=price.output_dollars_per_million,
    )


def _price_values(price: ModelPrice) -> dict[str, Any]:
    return {
        "version": price.version,
        "input_dollars_per_million": _number(price.input_nanos),
        "cached_input_dollars_per_million": _number(price.cached_input_nanos),
        "output_dollars_per_million": _number(price.output_nanos),
    }


def _number(nanos: int) -> int | float:
    """Within the prices allowed here, no float of three decimals is written with more of them."""
    whole, rest = divmod(nanos, _NANOS)
    return whole if rest == 0 else nanos / _NANOS
