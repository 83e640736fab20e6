"""The queue's function, ended by SIGKILL as it keeps an answer: before it is kept, or after, when nothing is paid yet.

Reads the function's event from standard input; the argument is ``before`` or ``after``.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from completions.domain.events import KeptReply
from completions.stores.replies import S3ReplyStore
from completions_cli.local.events import LambdaContext

_put = S3ReplyStore.put


def _put_and_die(self: S3ReplyStore, name: str, kept: KeptReply) -> None:
    if sys.argv[1] == "after":
        _put(self, name, kept)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    S3ReplyStore.put = _put_and_die  # type: ignore[method-assign]
    from completions.handlers.queued_completions import handler  # noqa: PLC0415 - it reads its environment

    handler(json.load(sys.stdin), LambdaContext("QueuedCompletionsFunction", 60))


if __name__ == "__main__":
    main()
