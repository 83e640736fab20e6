"""TGI's wire format: its two request bodies, its rules for them, and the pieces of its answers.

Transcribes text-generation-inference 3.3: ``router/src/{lib,validation,infer/mod}.rs``. Unknown parameters are
ignored, as there; what the embedded model cannot do is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from completions_cli.local.generation import Finish, FinishReason, GenerationRequest, StopRule
from completions_cli.local.ngram import SamplingSettings, Step
from completions_cli.local.tokenizer import MAX_PIECE_CHARS, Tokenizer
from completions_cli.local.vllm_wire import JsonObject

MAX_STOP_SEQUENCES = 4
MAX_TOP_N_TOKENS = 5
MAX_BEST_OF = 2
MAX_CLIENT_BATCH_SIZE = 4

Unsigned = Annotated[int, Field(ge=0, lt=2**32)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]


class TgiError(Exception):
    """A request that fails: ``kind`` is the ``error_type``, which goes with the HTTP ``status``."""

    def __init__(self, message: str, kind: str, status: int) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status

    @property
    def body(self) -> JsonObject:
        """The error object, on the wire and in Generate's streams."""
        return {"error": str(self), "error_type": self.kind}

    @property
    def openai_event(self) -> JsonObject:
        """What the streams of OpenAI bodies have instead; the status is this one whatever happened."""
        return {"error": {"message": str(self), "http_status_code": 422}}


class InvalidRequestError(TgiError):
    """A rule of ``validation.rs`` is broken: 422."""

    def __init__(self, rule: str) -> None:
        super().__init__(f"Input validation error: {rule}", "validation", 422)


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class GenerateParameters(_Body):
    """Types and defaults of ``parameters``; nullable where TGI's are optional."""

    best_of: Unsigned | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: Unsigned | None = None
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: Unsigned | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: Seed | None = None
    top_n_tokens: Unsigned | None = None
    grammar: dict[str, Any] | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: otherwise the likeliest is taken, a temperature of exactly 1 included."""
        return (
            self.do_sample
            or self.temperature not in (None, 1)
            or self.top_k not in (None, 0)
            or (self.top_p is not None and self.top_p < 1)
        )


class GenerateBody(_Body):
    """The native body. Without ``parameters`` sampling is on; with them it is off by default."""

    inputs: str
    parameters: GenerateParameters = GenerateParameters(do_sample=True)
    stream: bool = False


class ChatBody(_Body):
    """A chat: recognised, since it comes before the completion body, and refused."""

    messages: list[dict[str, Any]]


class CompletionBody(_Body):
    """The OpenAI body. ``model`` other than ``tgi`` names an adapter, and an unknown one means the base model."""

    model: str | None = None
    prompt: str | Annotated[list[str], Field(min_length=1)]
    max_tokens: Unsigned | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    seed: Seed | None = None
    suffix: str | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: list[str] | None = None

    def generates(self) -> list[GenerateBody]:
        """One Generate for each prompt. Raises ``TgiError`` for what the route itself refuses."""
        if self.suffix is not None:
            message = "Suffix is not supported and can be achieved by preprocessing the prompt."
            raise TgiError(message, "suffix not supported", 422)
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if len(prompts) > MAX_CLIENT_BATCH_SIZE:
            message = f"Number of prompts exceeds the maximum allowed batch size of {MAX_CLIENT_BATCH_SIZE}"
            raise TgiError(message, "batch size exceeded", 422)
        greedy = self.temperature == 0
        parameters = GenerateParameters(
            temperature=None if greedy else self.temperature,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            top_p=self.top_p,
            do_sample=not greedy,
            max_new_tokens=self.max_tokens,
            stop=self.stop or [],
            details=True,
            decoder_input_details=not self.stream,
            seed=self.seed,
        )
        return [GenerateBody(inputs=prompt, parameters=parameters) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that passed. ``seed`` is what the details tell: ``None`` where nothing was drawn."""

    body: GenerateBody
    generation: GenerationRequest
    seed: int | None

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's tokens, after ``truncate``."""
        return self.generation.prompts[0]


def validate(body: GenerateBody, tokenizer: Tokenizer, max_total_tokens: int, *, stream: bool) -> ValidRequest:
    """Check the rules in TGI's order. Raises ``InvalidRequestError``."""
    parameters = body.parameters
    _check_form(parameters, stream=stream)
    _check_ranges(parameters)
    if not body.inputs:
        raise InvalidRequestError("`inputs` cannot be empty")
    prompt, limit = _fit(body, tokenizer, max_total_tokens)
    if parameters.grammar is not None or parameters.watermark or parameters.typical_p is not None:
        raise InvalidRequestError("grammar is not supported")  # nor are the other two, for which TGI has no words
    seed = secrets.randbits(64) if parameters.seed is None else parameters.seed
    settings = SamplingSettings(
        temperature=(parameters.temperature or 1.0) if parameters.samples else 0.0,
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        top_k=parameters.top_k or 0,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        repetition_penalty=parameters.repetition_penalty or 1.0,
        top_logprobs=parameters.top_n_tokens or 0,
    )
    generation = GenerationRequest(
        prompts=(prompt,),
        settings=settings,
        max_tokens=limit,
        n=parameters.best_of or 1,
        seed=seed,
        stop=tuple(parameters.stop),
        skip_special_tokens=False,  # events show them, flagged; the whole text leaves them out
        stop_rule=StopRule.TAIL,
    )
    return ValidRequest(body, generation, seed if parameters.samples else None)


def _check_form(parameters: GenerateParameters, *, stream: bool) -> None:
    best_of = 1 if parameters.best_of is None else parameters.best_of
    if stream and best_of != 1:
        raise InvalidRequestError("`best_of` != 1 is not supported when streaming tokens")
    if stream and parameters.decoder_input_details:
        raise InvalidRequestError("`decoder_input_details` == true is not supported when streaming tokens")
    if not 0 < best_of <= MAX_BEST_OF:
        raise InvalidRequestError(f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {best_of}")
    chooses = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.typical_p)
    if best_of > 1 and not parameters.do_sample and all(value is None for value in chooses):
        raise InvalidRequestError("you must use sampling when `best_of` is > 1")
    if best_of > 1 and parameters.seed is not None:
        raise InvalidRequestError("`seed` must not be set when `best_of` > 1")


def _check_ranges(parameters: GenerateParameters) -> None:
    """One row a rule: the value or null, whether it is allowed, and TGI's words."""
    temperature, top_p, top_k, typical_p = (
        parameters.temperature,
        parameters.top_p,
        parameters.top_k,
        parameters.typical_p,
    )
    repetition, frequency = parameters.repetition_penalty, parameters.frequency_penalty
    stops, top_n = len(parameters.stop), parameters.top_n_tokens or 0
    rules = (
        (temperature is None or temperature > 0, "`temperature` must be strictly positive"),
        (repetition is None or repetition > 0, "`repetition_penalty` must be strictly positive"),
        (frequency is None or -2 <= frequency <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        (top_p is None or 0 < top_p < 1, "`top_p` must be > 0.0 and < 1.0"),
        (typical_p is None or 0 < typical_p < 1, "`typical_p` must be > 0.0 and < 1.0"),
        (top_k is None or top_k > 0, "`top_k` must be strictly positive"),
        (parameters.max_new_tokens != 0, "`max_new_tokens` must be strictly positive"),
        (
            stops <= MAX_STOP_SEQUENCES,
            f"`stop` supports up to {MAX_STOP_SEQUENCES} stop sequences. Given: {stops}",
        ),
        (
            top_n <= MAX_TOP_N_TOKENS,
            f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_N_TOKENS}. Given: {top_n}",
        ),
    )
    for allowed, rule in rules:
        if not allowed:
            raise InvalidRequestError(rule)


def _fit(body: GenerateBody, tokenizer: Tokenizer, max_total_tokens: int) -> tuple[tuple[int, ...], int]:
    """The prompt's tokens and how many may follow. Nothing is clamped; no limit means the rest of the context."""
    longest = max_total_tokens - 1
    truncate = body.parameters.truncate
    if truncate is not None and not 0 < truncate <= longest:
        raise InvalidRequestError(f"`truncate` must be strictly positive and less than {longest}. Given: {truncate}")
    if truncate is None and len(body.inputs) > max_total_tokens * MAX_PIECE_CHARS:
        # cannot fit, and would take long to count
        raise InvalidRequestError(_too_long(longest, len(body.inputs) // MAX_PIECE_CHARS))
    ids = tokenizer.encode(body.inputs)
    prompt = tuple(ids if truncate is None else ids[-truncate:])
    given = body.parameters.max_new_tokens
    limit = max(0, max_total_tokens - len(prompt)) if given is None else given
    if len(prompt) + limit > max_total_tokens:
        raise InvalidRequestError(
            f"`inputs` tokens + `max_new_tokens` must be <= {max_total_tokens}. "
            f"Given: {len(prompt)} `inputs` tokens and {limit} `max_new_tokens`"
        )
    if len(prompt) > longest:
        raise InvalidRequestError(_too_long(longest, len(prompt)))
    return prompt, limit


def _too_long(limit: int, given: int) -> str:
    return f"`inputs` must have less than {limit} tokens. Given: {given}"


def finish_name(finish: Finish) -> str:
    """TGI's word for the end of a choice."""
    if finish.reason is FinishReason.LENGTH:
        return "length"
    return "eos_token" if finish.stop_reason is None else "stop_sequence"


def token_body(step: Step, text: str, tokenizer: Tokenizer) -> JsonObject:
    """A token of an event or of the details."""
    special = tokenizer.is_special(step.token_id)
    return {"id": step.token_id, "text": text, "logprob": step.logprob, "special": special}


def top_tokens_body(step: Step, tokenizer: Tokenizer) -> list[JsonObject]:
    """The likeliest tokens in place of ``step``."""
    steps: Sequence[Step] = [Step(token_id, logprob) for token_id, logprob in step.top]
    return [token_body(item, tokenizer.decode([item.token_id]), tokenizer) for item in steps]
