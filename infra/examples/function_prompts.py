"""Lines of a batch that ask for function bodies, in the shape of HumanEval: a signature and its docstring.

The functions are the standard library's. Usage: ``function_prompts.py [--count 164] [--model demo]``.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

STOPS = ["\ndef ", "\nclass ", "\nif ", "\nprint("]


def prompts() -> Iterator[tuple[str, str]]:
    """The name of each function at the top of a module, and its source down to the end of its docstring."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                ends = node.body[0].end_lineno
                yield f"{path.stem}.{node.name}", "\n".join(lines[node.lineno - 1 : ends]) + "\n"


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=164)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    for number, (name, prompt) in enumerate(islice(prompts(), options.count)):
        body = {
            "model": options.model,
            "prompt": prompt,
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "stop": STOPS,
        }
        line = {"custom_id": f"{number:03}-{name}", "method": "POST", "url": "/v1/completions", "body": body}
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
