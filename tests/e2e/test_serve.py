"""``completions serve`` as a newcomer meets it: a process of its own, what it prints, how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import httpx2 as httpx
import pytest

from completions_cli.local.model_container import create_model_container
from completions_cli.local.ngram import NGramModel, standard_library
from completions_cli.local.server import bind
from completions_cli.local.server import serving as serving_app
from served import COMMAND, clean_environment, serving


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The finished command, run as from a fresh shell."""
    return subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
    )


def free_port() -> int:
    with bind(0) as listener:
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def printed(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A served stack's folder and what it printed."""
    folder = tmp_path_factory.mktemp("newcomer")
    with serving(folder, project_root / "template.yaml") as (_, text):
        yield folder, text


def test_it_names_url_key_and_models(printed: tuple[Path, str]) -> None:
    text = printed[1]
    base_url = re.search(r"base URL +(\S+)/v1", text)
    assert base_url is not None
    assert "sk-local" in text
    assert "demo, demo-vllm, demo-lmi, demo-tgi\n" in text
    assert httpx.get(f"{base_url[1]}/healthz").status_code == 200


def test_the_printed_curl_line_works_when_pasted(printed: tuple[Path, str]) -> None:
    match = re.search(r"^curl .*?\n\n", printed[1], re.MULTILINE | re.DOTALL)
    assert match is not None
    reply = subprocess.run(["sh", "-c", match[0]], capture_output=True, text=True, timeout=60, check=True)
    assert reply.stdout.endswith("data: [DONE]\n\n")


def test_the_printed_sdk_snippet_works_when_pasted(printed: tuple[Path, str]) -> None:
    match = re.search(r"^from openai import.*?\n\n", printed[1], re.MULTILINE | re.DOTALL)
    assert match is not None
    reply = run([sys.executable, "-c", match[0]], Path.cwd())
    assert reply.returncode == 0, reply.stderr
    assert reply.stdout.strip()


@pytest.mark.parametrize("model", ["demo-lmi", "demo-tgi"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_container_family_gives_the_one_models_answer(
    printed: tuple[Path, str], model: str, stream: bool
) -> None:
    base_url = re.search(r"base URL +(\S+)/v1", printed[1])
    assert base_url is not None
    body = {"prompt": "import os\n\ndef main(", "max_tokens": 12, "temperature": 0, "logprobs": 1}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answers = []
    for name in ("demo", model):
        reply = httpx.post(
            f"{base_url[1]}/v1/completions",
            json={"model": name, **body},
            headers={"Authorization": "Bearer sk-local"},
            timeout=30,
        )
        assert reply.status_code == 200, reply.text
        records = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if "{" in line]
        assert all(record.pop("model") == name for record in records)
        choices = [choice for record in records for choice in record["choices"]]
        text = "".join(choice["text"] for choice in choices)
        answers.append((text, choices[-1]["finish_reason"], records[-1]["usage"]))
    assert answers[0] == answers[1]
    assert answers[0][1] == "length"
    assert answers[0][2]["completion_tokens"] == 12


def test_usage_shows_what_was_spent(printed: tuple[Path, str]) -> None:
    folder, text = printed
    base_url = re.search(r"base URL +(\S+)/v1", text)
    assert base_url is not None
    body = {"model": "demo-vllm", "prompt": "import os\n", "max_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{base_url[1]}/v1/completions", json=body, headers={"Authorization": "Bearer sk-local"})
    usage = answer.json()["usage"]

    deadline = time.monotonic() + 20
    while "demo-vllm" not in (table := run([COMMAND, "usage", "--local"], folder).stdout):
        assert time.monotonic() < deadline, "the stream takes a moment, but not so long"

    (row,) = [line for line in table.splitlines() if "demo-vllm" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    tokens = [str(usage["prompt_tokens"]), "0", str(usage["completion_tokens"])]
    assert cells == ["demo-vllm", "local", "1", "1", *tokens, "0.00"]


def test_usage_without_a_running_stack_says_what_to_do(tmp_path: Path) -> None:
    reply = run([COMMAND, "usage", "--local"], tmp_path)
    assert reply.returncode == 1
    assert reply.stderr == "completions usage: no local stack runs from this folder; start one with `make serve`\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_it_cleanly(project_root: Path, tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path, project_root / "template.yaml") as (process, text):
        base_url = re.search(r"base URL +(\S+)/v1", text)
        assert base_url is not None
        process.send_signal(number)

        assert process.wait(timeout=20) == 0
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{base_url[1]}/healthz")
        assert not list((tmp_path / ".local").iterdir())


def test_a_taken_port_is_one_line(project_root: Path, tmp_path: Path) -> None:
    with bind(0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        reply = run(
            [COMMAND, "serve", "--port", str(port), "--template", str(project_root / "template.yaml")], tmp_path
        )
    assert reply.returncode == 1
    assert reply.stdout == ""
    assert reply.stderr == f"completions serve: port {port} on 127.0.0.1 cannot be used: Address already in use\n"


def test_a_missing_template_says_where_to_run_it(tmp_path: Path) -> None:
    reply = run([COMMAND, "serve", "--port", "0"], tmp_path)
    assert reply.returncode == 1
    assert reply.stderr.startswith("completions serve: template.yaml: No such file or directory; run this where")
    assert reply.stderr.count("\n") == 1


def test_another_openai_compatible_server_can_answer(project_root: Path, tmp_path: Path) -> None:
    """The upstream here is the embedded model's own container, reached as any other server is."""
    container = create_model_container(NGramModel.train(standard_library()), served_model="acme")
    with (
        serving_app(container, bind(0)) as url,
        serving(tmp_path, project_root / "template.yaml", "--upstream", f"{url}/v1", "--upstream-model", "acme") as (
            _,
            text,
        ),
    ):
        base_url = re.search(r"base URL +(\S+)/v1", text)
        assert base_url is not None
        body = {"model": "demo", "prompt": "import os\n", "max_tokens": 5, "temperature": 0}
        reply = httpx.post(f"{base_url[1]}/v1/completions", json=body, headers={"Authorization": "Bearer sk-local"})
        direct = httpx.post(f"{url}/v1/completions", json={**body, "model": "acme"})

    assert reply.status_code == 200
    assert reply.json()["model"] == "demo"
    assert reply.json()["choices"][0]["text"] == direct.json()["choices"][0]["text"]


def test_a_gguf_file_without_the_extra_says_how_to_get_it(project_root: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    template = str(project_root / "template.yaml")
    reply = run([COMMAND, "serve", "--port", "0", "--template", template, "--gguf", str(model)], tmp_path)
    assert reply.returncode == 1
    assert "make serve EXTRA=llama" in reply.stderr
    assert reply.stderr.count("\n") == 1


def test_a_dead_upstream_is_a_503(project_root: Path, tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with serving(tmp_path, project_root / "template.yaml", "--upstream", dead) as (_, text):
        base_url = re.search(r"base URL +(\S+)/v1", text)
        assert base_url is not None
        body = {"model": "demo", "prompt": "import os\n"}
        reply = httpx.post(f"{base_url[1]}/v1/completions", json=body, headers={"Authorization": "Bearer sk-local"})
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "server_error"


def test_a_folder_has_one_stack_and_keeps_its_environment(project_root: Path, tmp_path: Path) -> None:
    template = str(project_root / "template.yaml")
    with serving(tmp_path, Path(template)):
        second = run([COMMAND, "serve", "--port", "0", "--template", template], tmp_path)
        usage = run([COMMAND, "usage", "--local"], tmp_path)

    assert second.returncode == 1
    assert re.fullmatch(
        r"completions serve: another local stack \(process \d+\) runs from this folder; stop it first\n", second.stderr
    )
    assert usage.returncode == 0


def test_what_a_killed_stack_left_behind_does_not_count(project_root: Path, tmp_path: Path) -> None:
    with serving(tmp_path, project_root / "template.yaml") as (process, _):
        process.kill()
        process.wait()
    assert run([COMMAND, "usage", "--local"], tmp_path).returncode == 1
    with serving(tmp_path, project_root / "template.yaml") as (_, text):
        assert "Ready" in text


@pytest.mark.parametrize("mode", ["streamed", "buffered"])
def test_a_signal_ends_an_answer_in_progress_and_settles_it(project_root: Path, tmp_path: Path, mode: str) -> None:
    options = ("--tokens-per-second", "0.05", "--response-mode", mode)
    with serving(tmp_path, project_root / "template.yaml", *options) as (process, text):
        base_url = re.search(r"base URL +(\S+)/v1", text)
        assert base_url is not None
        body = {"model": "demo", "prompt": "import os\n", "max_tokens": 5, "stream": True}
        asked = Thread(target=ask, args=(f"{base_url[1]}/v1/completions", body))
        asked.start()
        time.sleep(1)  # the request is with the model by now, which takes twenty seconds for a token
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) == 0
        asked.join()
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()


def ask(url: str, body: dict[str, object]) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(url, json=body, headers={"Authorization": "Bearer sk-local"}, timeout=30)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dynamodb-url", "foo"), "DynamoDB at foo"),
        (("--dynamodb-url", "http://127.0.0.1:9"), "DynamoDB at http://127.0.0.1:9"),
        (("--upstream", "foo"), "not an http"),
        (("--upstream-model", "foo"), "need --upstream"),
    ],
)
def test_an_option_that_cannot_work_says_so_without_a_traceback(
    project_root: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    template = str(project_root / "template.yaml")
    reply = run([COMMAND, "serve", "--port", "0", "--template", template, *options], tmp_path)
    assert reply.returncode != 0
    assert words in reply.stderr
    assert "Traceback" not in reply.stderr
