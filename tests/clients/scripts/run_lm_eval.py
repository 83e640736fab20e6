"""lm-eval's ``local-completions`` over the tasks of a folder; prints its scores as one JSON document.

Arguments: the folder with the tasks and ``tokenizer/``, the URL of the completions route, more model arguments as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# the project does not depend on them
from lm_eval import simple_evaluate  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]
from transformers import AutoTokenizer  # type: ignore[import-not-found]

folder = Path(sys.argv[1])
tokenizer = str(folder / "tokenizer")
tasks = sorted(path.stem for path in folder.glob("*.yaml"))
model = {
    "model": "demo",
    "base_url": sys.argv[2],
    "tokenizer": tokenizer,
    "tokenizer_backend": "huggingface",
    "max_retries": 1,
    **json.loads(sys.argv[3]),
}


def answers(sample: dict[str, Any]) -> list[Any]:
    """What the model said to each request of one document."""
    return [response[0] for response in sample["resps"]]


results = simple_evaluate(
    model="local-completions",
    model_args=model,
    tasks=tasks,
    task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    bootstrap_iters=0,
    log_samples=True,
)
samples = {task: sorted(results["samples"][task], key=lambda sample: sample["doc_id"]) for task in tasks}
encode = AutoTokenizer.from_pretrained(tokenizer)
report = {
    "metrics": {task: {key: value for key, value in results["results"][task].items() if "," in key} for task in tasks},
    "answers": {task: [answers(sample) for sample in samples[task]] for task in tasks},
    "token ids": [encode(line["text"]).input_ids for line in map(json.loads, (folder / "lines.jsonl").open())],
}
json.dump(report, sys.stdout)
