"""An embedded model whose tokens a test decides, for what a container makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import anyio
from starlette.types import ASGIApp, Message, Scope

from completions_cli.local.ngram import NGramModel, SamplingSettings, Step
from completions_cli.local.tokenizer import Special


class ScriptedModel(NGramModel):
    """Produces fixed tokens with log-probability -1 and one alternative each, then fails or repeats end of text.

    ``asked`` holds the settings and seed of each generation.
    """

    script: Sequence[int] = ()
    failure: str | None = None
    produced = 0
    closed = False
    asked: tuple[tuple[SamplingSettings, int | None], ...] = ()

    def generate(
        self, prompt_ids: Sequence[int], settings: SamplingSettings, seed: int | None = None
    ) -> Iterator[Step]:
        self.asked = (*self.asked, (settings, seed))
        try:
            for token in self.script:
                self.produced += 1
                yield Step(token, -1.0, ((ord("z"), -0.5),)[: settings.top_logprobs])
            if self.failure:
                raise RuntimeError(self.failure)
            while True:
                yield Step(Special.END_OF_TEXT, -2.0)
        finally:
            self.closed = True


def visit_and_leave(app: ASGIApp, path: str, body: Mapping[str, object]) -> None:
    """Post ``body``, and hang up when the first bytes of the answer arrive."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
    }
    incoming: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def visit() -> None:
        left = anyio.Event()

        async def receive() -> Message:
            if incoming:
                return incoming.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message.get("body"):
                left.set()

        await app(scope, receive, send)

    anyio.run(visit)
