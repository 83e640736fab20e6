"""Every container family there is a codec for, by the name the registry calls it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from completions.backends.codec import Codec
from completions.backends.lmi import LmiCodec
from completions.backends.lmi_inputs import LmiInputsCodec
from completions.backends.openai_server import OpenAIServerCodec
from completions.backends.tgi import TgiCodec
from completions.backends.tgi_openai import TgiOpenAICodec
from completions.backends.vllm import VllmCodec

CODECS: Final[Mapping[str, Codec]] = MappingProxyType(
    {
        "vllm": VllmCodec(),
        "vllm-invocations": VllmCodec(routed=False),
        "lmi": LmiCodec(),
        "lmi-inputs": LmiInputsCodec(),
        "lmi-rolling": LmiInputsCodec(rolling=True),
        "tgi": TgiCodec(),
        "tgi-openai": TgiOpenAICodec(),
        "openai": OpenAIServerCodec(),
    }
)
