"""vLLM's completion wire format: what a request may say, how it is refused, and what an answer looks like.

Mirrors vLLM 0.27 (``entrypoints/openai/completion/protocol.py``, ``sampling_params.py``). Features that the embedded
model cannot give are refused instead of ignored, so that a test never passes on an option that had no effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from completions_cli.local.generation import Finish, TokenEvent
from completions_cli.local.ngram import SamplingSettings, Step
from completions_cli.local.tokenizer import Tokenizer

JsonObject: TypeAlias = dict[str, Any]
TokenId: TypeAlias = Annotated[int, Field(ge=0)]

MAX_LOGPROBS = 20  # the server's default --max-logprobs
MAX_STOPS = 4  # VLLM_MAX_STOP_STRINGS of later versions; the dialects allow no more either
MAX_PROMPTS = 1024  # VLLM_MAX_COMPLETION_PROMPTS
MAX_CACHE_SALT = 1024
CACHE_SALT_EXCLUDES = "@/\\\0"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens",
)  # fmt: skip
UNSUPPORTED = (
    "allowed_token_ids", "bad_words", "prompt_embeds", "prompt_logprobs", "structured_outputs", "suffix",
    "truncate_prompt_tokens", "use_beam_search",
)  # fmt: skip


class RequestRefusedError(Exception):
    """A rule is broken: vLLM's VLLMValidationError. ``param`` and ``value`` appear in the message as vLLM has them."""

    def __init__(self, message: str, param: str | None = None, value: object = None) -> None:
        named = {"parameter": param, "value": value}
        extras = ", ".join(f"{name}={content}" for name, content in named.items() if content is not None)
        super().__init__(f"{message} ({extras})" if extras else message)
        self.param = param


class InvalidBodyError(Exception):
    """The body cannot be read at all: FastAPI's RequestValidationError, without a parameter to name."""


class UnknownModelError(Exception):
    """The body names a model that is not served: 404."""


class StreamOptions(BaseModel):
    """``stream_options``: an empty object already turns usage on."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class CompletionRequest(BaseModel):
    """Types and defaults of a request body. Unknown fields, ``best_of`` among them, are accepted and ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: list[TokenId] | list[list[TokenId]] | str | list[str]
    echo: bool | None = False
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1
    presence_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    cache_salt: str | None = None

    @classmethod
    def parse(cls, body: object) -> CompletionRequest:
        """Check rules, then types. Raises ``RequestRefusedError`` or pydantic's ``ValidationError``."""
        if isinstance(body, dict):
            _check_before_types(body)
        return cls.model_validate(body)

    @property
    def prompt_items(self) -> Sequence[str | list[int]]:
        """One item a prompt. A list of integers is one prompt, not a batch."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]

    @property
    def token_limit(self) -> int:
        """``max_tokens`` with null as the default of 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompt_only(self) -> bool:
        """Nothing but the prompt comes back; the engine still makes one token, hides it and counts it."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def stops(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_on_each_chunk(self) -> bool:
        """Whether every chunk tells its choice's usage; only together with ``include_usage``."""
        return (
            self.stream_options is not None and self.usage_wanted and bool(self.stream_options.continuous_usage_stats)
        )


def _check_before_types(body: Mapping[str, Any]) -> None:
    """The rules vLLM looks at on the raw body; from 0.27 on ``/invocations`` lets their messages through."""
    logprobs = body.get("logprobs")
    if logprobs is not None and not isinstance(logprobs, int | float):
        raise RequestRefusedError("`logprobs` must be an integer.", "logprobs", logprobs)
    if logprobs is not None and logprobs < 0 and logprobs != -1:
        raise RequestRefusedError("`logprobs` must be a positive value or -1.", "logprobs", logprobs)
    if body.get("stream_options") and not body.get("stream"):
        raise RequestRefusedError("Stream options can only be defined when `stream=True`.", "stream_options")
    _check_unsupported(body)
    _check_cache_salt(body.get("cache_salt"))
    prompt = body.get("prompt")
    if prompt is None or prompt == "":
        raise RequestRefusedError("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, list) and not isinstance(next(iter(prompt), None), int) and len(prompt) > MAX_PROMPTS:
        message = f"prompt list length {len(prompt)} exceeds the maximum allowed count of {MAX_PROMPTS}."
        raise RequestRefusedError(message, "prompt")


def _check_cache_salt(salt: object) -> None:
    """A salt keeps tenants apart in the prefix cache; this model has none, so a valid one changes nothing."""
    if salt == "":
        raise RequestRefusedError("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if isinstance(salt, str) and (len(salt) > MAX_CACHE_SALT or any(letter in salt for letter in CACHE_SALT_EXCLUDES)):
        rule = f"at most {MAX_CACHE_SALT} characters, none of them '@', '/', '\\' or NUL"
        raise RequestRefusedError(f"Parameter 'cache_salt' must have {rule}.", "cache_salt")


def _check_unsupported(body: Mapping[str, Any]) -> None:
    unsupported = {name: body.get(name) for name in UNSUPPORTED}
    if body.get("response_format") != {"type": "text"}:
        unsupported["response_format"] = body.get("response_format")
    for name, value in unsupported.items():
        if value is not None and value is not False and value != []:
            raise RequestRefusedError(f"{name} is not currently supported", name)


def check_sampling(request: CompletionRequest, vocabulary_size: int) -> None:
    """The ranges of vLLM's SamplingParams, checked once the types are right."""
    _check_ranges(request)
    if request.token_limit < 1 and not request.prompt_only:
        raise RequestRefusedError(
            f"max_tokens must be at least 1, got {request.token_limit}.", "max_tokens", request.token_limit
        )
    if not 0 <= request.min_tokens <= max(1, request.token_limit):
        raise RequestRefusedError(
            f"min_tokens must be in [0, max_tokens={request.token_limit}], got {request.min_tokens}."
        )
    if "" in request.stops:
        raise RequestRefusedError("stop cannot contain an empty string.")
    logprobs = vocabulary_size if request.logprobs == -1 else request.logprobs or 0
    if logprobs > MAX_LOGPROBS:
        message = f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise RequestRefusedError(message, "logprobs", logprobs)
    if request.temperature == 0 and request.n > 1:
        raise RequestRefusedError(f"n must be 1 when using greedy sampling, got {request.n}.")
    unknown = [key for key in request.logit_bias or () if not (key.isdecimal() and int(key) < vocabulary_size)]
    if unknown:
        message = f"token_id(s) {unknown} in logit_bias contain out-of-vocab token ids. Vocab size: {vocabulary_size}"
        raise RequestRefusedError(message, "logit_bias", unknown)


def _check_ranges(request: CompletionRequest) -> None:
    """One row a field: its value or null, whether it is allowed, and the rule in words."""
    temperature, top_p, top_k, min_p = request.temperature, request.top_p, request.top_k, request.min_p
    presence, frequency, repetition = request.presence_penalty, request.frequency_penalty, request.repetition_penalty
    rules = (
        ("n", request.n, request.n >= 1, "at least 1"),
        ("temperature", temperature, temperature is None or 0 <= temperature <= 2, "in [0, 2]"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "in (0, 1]"),
        ("top_k", top_k, top_k is None or top_k >= -1, "0 (disable), or at least 1"),
        ("min_p", min_p, min_p is None or 0 <= min_p <= 1, "in [0, 1]"),
        ("presence_penalty", presence, presence is None or -2 <= presence <= 2, "in [-2, 2]"),
        ("frequency_penalty", frequency, frequency is None or -2 <= frequency <= 2, "in [-2, 2]"),
        ("repetition_penalty", repetition, repetition is None or 0 < repetition < float("inf"), "greater than zero"),
    )
    for name, value, allowed, rule in rules:
        if not allowed:
            raise RequestRefusedError(f"{name} must be {rule}, got {value}.", name, value)


def settings_of(request: CompletionRequest) -> SamplingSettings:
    """Sampling settings, with the defaults for what is null; ``logit_bias`` is clamped to +-100."""
    given = {name: getattr(request, name) for name in SAMPLING if getattr(request, name) is not None}
    bias = {int(token): max(-100.0, min(100.0, value)) for token, value in (request.logit_bias or {}).items()}
    return SamplingSettings(
        **given,
        logit_bias=bias,
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        top_logprobs=request.logprobs or 0,
    )


def error_body(message: str, kind: str, code: int, param: str | None = None) -> JsonObject:
    """vLLM's error shape; ``code`` repeats the HTTP status as an integer."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def flat_error_body(message: str, kind: str, code: int, param: str | None = None) -> JsonObject:
    """The same as older versions have it, without the ``error`` around it."""
    return {"object": "error", "message": message, "type": kind, "param": param, "code": code}


def usage_body(prompt_tokens: int, completion_tokens: int) -> JsonObject:
    """Token counts in vLLM's key order."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


def logprobs_body(steps: Sequence[Step], name: Callable[[int], str], first_offset: int = 0) -> JsonObject:
    """The four arrays, tokens shown by ``name``. Offsets add up the lengths of what is shown; the chosen token leads
    its ``top_logprobs``."""
    arrays: JsonObject = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    offset = first_offset
    for step in steps:
        token = name(step.token_id)
        top = None
        if step.logprob is not None:
            ranked = ((step.token_id, step.logprob), *step.top)
            top = {name(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob in ranked}
        arrays["text_offset"].append(offset)
        arrays["token_logprobs"].append(None if step.logprob is None else max(step.logprob, LOWEST_LOGPROB))
        arrays["tokens"].append(token)
        arrays["top_logprobs"].append(top)
        offset += len(token)
    return arrays


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the answer's objects share: ``id``, ``model`` and ``created`` (Unix seconds) are constant over a stream."""

    id: str
    model: str
    created: int

    @classmethod
    def now(cls, request_id: str, model: str) -> Envelope:
        """An envelope stamped with the current time."""
        return cls(f"cmpl-{request_id}", model, int(time.time()))

    def body(self, choices: Sequence[JsonObject], **extra: object) -> JsonObject:
        """One answer object or stream chunk."""
        shared = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**shared, "choices": list(choices), **extra}


def choice_body(index: int, text: str, logprobs: JsonObject | None, finish: Finish | None) -> JsonObject:
    """A choice of an answer or of a chunk: vLLM writes nulls here, and leaves out unset fields one level up only."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if finish is None else finish.reason.value,
        "stop_reason": None if finish is None else finish.stop_reason,
        "prompt_token_ids": None,
        "token_ids": None,
    }


class ChoiceWriter:
    """Turns the events of one choice into wire choices: adds the echoed prompt, counts offsets and tokens."""

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, prompt: Sequence[Step]) -> None:
        self.prompt = prompt
        self.tokens = 0
        self._request = request
        self._tokenizer = tokenizer
        self._name = _id_name if request.return_tokens_as_token_ids else tokenizer.token_text
        self._chars = 0

    def write(self, events: Sequence[TokenEvent]) -> JsonObject:
        """One wire choice of consecutive events: a single one in a stream, all of them in a plain answer."""
        steps = [] if self._request.prompt_only else [event.step for event in events]
        text = "" if self._request.prompt_only else "".join(event.text for event in events)
        if self._request.echo and self.tokens == 0:
            text = self._tokenizer.decode(step.token_id for step in self.prompt) + text
            steps = [*self.prompt, *steps]
        logprobs = self._logprobs(steps)
        self.tokens += len(events)
        self._chars += len(text)
        return choice_body(events[-1].index, text, logprobs, events[-1].finish)

    def write_nothing(self, index: int) -> JsonObject:
        """A choice of a chunk that carries no token."""
        return choice_body(index, "", self._logprobs([]), None)

    def _logprobs(self, steps: Sequence[Step]) -> JsonObject | None:
        return None if self._request.logprobs is None else logprobs_body(steps, self._name, self._chars)


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"
