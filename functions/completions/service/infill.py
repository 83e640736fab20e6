"""Fill in the middle: a text prompt and a suffix become one prompt in the model family's own markers.

Templates from the families' tokenizers and the editors that use them (Cody, Continue, Tabby); spaces count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from completions.domain.catalog import ModelRoute
from completions.domain.completion import CompletionRequest, Prompt
from completions.domain.errors import InvalidRequestError, UnsupportedParameterError


@dataclass(frozen=True, slots=True)
class InfillTemplate:
    """``template`` takes ``{prefix}`` and ``{suffix}``; ``markers`` are the family's special tokens, none of which may
    stand in the caller's own text nor in the answer; ``cue`` is the one that asks for the middle."""

    template: str
    cue: str
    markers: tuple[str, ...]

    def render(self, prefix: str, suffix: str) -> str:
        """The prompt that asks for what stands between the two."""
        return self.template.format(prefix=prefix, suffix=suffix)


_QWEN: Final = (
    *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
)

TEMPLATES: Final = {
    "qwen": InfillTemplate("<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>", "<|fim_middle|>", _QWEN),
    "starcoder": InfillTemplate(
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        "<fim_middle>",
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>"),
    ),
    "codellama": InfillTemplate("<PRE> {prefix} <SUF>{suffix} <MID>", "<MID>", ("<PRE>", "<SUF>", "<MID>", "<EOT>")),
    "deepseek": InfillTemplate(
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # noqa: RUF001 - the tokens' own characters
        "<｜fim▁end｜>",  # noqa: RUF001
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    ),
    "codegemma": InfillTemplate(
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        "<|fim_middle|>",
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>", "<end_of_turn>", "<eos>"),
    ),
    "codestral": InfillTemplate("[SUFFIX]{suffix}[PREFIX]{prefix}", "[PREFIX]", ("[PREFIX]", "[SUFFIX]")),
}


def infill_stops(request: CompletionRequest, route: ModelRoute) -> tuple[str, ...]:
    """The markers that end an infill, whether we build its prompt from ``suffix`` or the caller did."""
    template = TEMPLATES.get(route.fim_family or "")
    if template is None:
        return ()
    asked = request.suffix or any(isinstance(prompt, str) and template.cue in prompt for prompt in request.prompts)
    return template.markers if asked else ()


def with_infill(request: CompletionRequest, route: ModelRoute) -> CompletionRequest:
    """``request`` with its suffix folded into each prompt; itself when it has none.

    Raises ``UnsupportedParameterError`` when the model has no template, ``InvalidRequestError`` for token prompts, for
    ``echo`` (the echoed text would be the template), and for text that holds a marker.
    """
    if not request.suffix:
        return request
    name = request.param_names.get("suffix", "suffix")
    template = TEMPLATES.get(route.fim_family or "")
    if template is None:
        raise UnsupportedParameterError(
            f"The model '{route.model_id}' does not support '{name}'.", param=name, code="unsupported_parameter"
        )
    if request.echo:
        raise InvalidRequestError(f"'{name}' cannot be combined with 'echo'.", param=name)
    prompts = tuple(_infilled(prompt, request.suffix, template, name) for prompt in request.prompts)
    return replace(request, prompts=prompts, suffix=None)


def _infilled(prompt: Prompt, suffix: str, template: InfillTemplate, name: str) -> str:
    if not isinstance(prompt, str):
        raise InvalidRequestError(f"'{name}' needs a text prompt, not token ids.", param=name)
    if any(marker in prompt or marker in suffix for marker in template.markers):
        raise InvalidRequestError(
            f"The prompt or '{name}' holds one of the model's own infill markers; send such a prompt without '{name}'.",
            param=name,
        )
    return template.render(prompt, suffix)
