# Every command of the project. Each one sets itself up: only Python >= 3.11 with pip is expected of the machine.
# Conventions: PORT, ARGS and EXTRA for `make serve`, ARCH (arm64 or x86_64) for `make build`, ENV (dev or prod) for
# `make deploy`, ARGS for `make bench`, N for `make soak`.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup serve test sam-local clients check coverage bench batches soak build deploy adapter lint types contracts templates openapi requirements requirements.txt

TOOLS := $(CURDIR)/.tools
export PATH := $(TOOLS)/bin:$(PATH)
export PYTHONPATH := $(if $(wildcard $(TOOLS)/uv),$(TOOLS):)$(PYTHONPATH)
export UV_PYTHON_DOWNLOADS := never
export SAM_CLI_TELEMETRY := 0
ARCH ?= arm64
export ARCHITECTURE := $(ARCH)
RUN := uv run --frozen --quiet
SAM := $(RUN) sam
ENV ?=
# as YAML, which sam reads: on a command line, values would be quoted for two readers
PARAMETERS = .aws-sam/parameters-$(ENV).yaml
WITH_EXTRA := $(if $(EXTRA),--extra $(EXTRA))
# The version of the deployed layer is 1.0.0; its registry has the release candidate alone.
ADAPTER_VERSION := 1.0.0-rc1
ADAPTER := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/completions-gateway/lambda-adapter-$(ADAPTER_VERSION)
PARALLEL := --numprocesses auto --maxprocesses 4
EXPORT := uv export --frozen --no-default-groups --no-emit-project --no-header 2>/dev/null

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## Install what the other targets need into .venv (and uv into .tools when it is missing)
	@command -v uv >/dev/null || { echo "setup: uv is missing, installing it into .tools"; \
	  python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target "$(TOOLS)" uv; }
	@test -d .venv || echo "setup: creating .venv with the locked dependencies"
	@uv sync --frozen --quiet $(WITH_EXTRA)

serve: setup  ## Run the whole service on this machine, until Ctrl-C; ARGS="--help" for its options
	@exec $(RUN) $(WITH_EXTRA) completions serve $(ARGS)

test: setup  ## Run the tests
	@$(RUN) pytest $(PARALLEL) -m "not clients"

sam-local: setup  ## Run the functions under the real `sam local`, where Docker and the Lambda base image are at hand
	@SAM_LOCAL_READY=1 $(RUN) pytest tests/integration/test_sam_local.py

clients: setup  ## Run official clients of the dialects, each installed in an environment of its own
	@$(RUN) pytest -m clients

check: setup lint types contracts requirements openapi templates  ## Lint, types, import contracts, templates, tests, build
	@$(RUN) pytest $(PARALLEL) -m "not clients"
	@$(MAKE) --no-print-directory build

coverage: setup  ## Run the tests and see that they reach 95 % of the service, branches too; a third slower than without
	@$(RUN) pytest $(PARALLEL) -m "not clients" --cov --cov-report=term --cov-fail-under=95

lint: setup
	@$(RUN) ruff check
	@$(RUN) ruff format --check

types: setup
	@$(RUN) mypy

contracts: setup
	@$(RUN) lint-imports --no-logo 2>/dev/null || $(RUN) lint-imports

requirements: setup  # what the functions install must be what the lock says
	@uv export --frozen --no-default-groups --no-emit-project \
	  | grep -v '^#' | diff - functions/requirements.txt \
	  || { echo "functions/requirements.txt is stale: make requirements.txt"; exit 1; }

requirements.txt: setup  ## Export the lock to functions/requirements.txt
	@uv export --frozen --no-default-groups --no-emit-project | grep -v '^#' > functions/requirements.txt

openapi: setup  # the committed document must be what the apps say; `completions openapi` writes it
	@$(RUN) completions openapi --check

templates: setup
	@AWS_DEFAULT_REGION=us-east-1 $(RUN) sam validate >/dev/null  # the transform, which --lint leaves out
	@$(RUN) sam validate --lint
	@$(RUN) cfn-lint --include-checks I --non-zero-exit-code informational --template infra/tables.yaml \
	  infra/pipelines.yaml infra/observability.yaml infra/managed-instances.yaml infra/model-endpoint.yaml
	@CHECKOV_READY=1 $(RUN) pytest -q tests/infra/test_checkov.py
	@for env in dev prod; do $(RUN) completions doctor --offline --config-env $$env >/dev/null || \
	  { $(RUN) completions doctor --offline --config-env $$env; exit 1; }; done
	@$(RUN) completions models schema --check
	@$(RUN) completions models check infra/models.yaml

build: setup  ## Build the functions for ARCH (default arm64), without Docker
	@mkdir -p .aws-sam
	@$(RUN) sam build --parallel --parameter-overrides Architecture=$(ARCH) >.aws-sam/build.log 2>&1 \
	  || { cat .aws-sam/build.log; echo "build: sam build failed, and nothing in .aws-sam/build is to be used"; exit 1; }
	@sed -n '/^build: /p' .aws-sam/build.log | sort -u
	@$(RUN) python tests/bench/artifact.py --sizes .aws-sam/build

deploy: setup  ## Deploy the environment ENV (dev or prod) of samconfig.toml, unless the doctor finds what would fail
	@test -n "$(ENV)" || { echo "deploy: which environment of samconfig.toml? make deploy ENV=dev" >&2; exit 2; }
	@$(RUN) completions doctor --config-env "$(ENV)" --before
	@mkdir -p .aws-sam
	@$(RUN) completions doctor overrides --config-env "$(ENV)" >"$(PARAMETERS)"
	@$(MAKE) --no-print-directory build ARCH=$$(sed -n 's/^ *"Architecture": "\(.*\)".*/\1/p' "$(PARAMETERS)")
	@$(SAM) deploy --config-env "$(ENV)" --parameter-overrides "file://$(PARAMETERS)"
	@echo; echo "Next, in this shell:"
	@echo '  eval "$$(.venv/bin/completions doctor environment --config-env $(ENV))"'
	@echo '  .venv/bin/completions models apply infra/models.yaml   # what the keys may ask for'
	@echo '  .venv/bin/completions keys create --owner NAME         # what a caller sends'
	@echo '  .venv/bin/completions doctor --config-env $(ENV)'

adapter: setup  ## Stream through the real Lambda Web Adapter, which cargo builds once
	@if ! test -x "$(ADAPTER)/bin/lambda-adapter" && ! command -v cargo >/dev/null; then \
	  echo "adapter: not run, for there is no cargo to build Lambda Web Adapter $(ADAPTER_VERSION) with"; exit 0; fi; \
	test -x "$(ADAPTER)/bin/lambda-adapter" || { echo "adapter: building version $(ADAPTER_VERSION), some minutes"; \
	  cargo install --quiet --locked lambda_web_adapter --version $(ADAPTER_VERSION) --root "$(ADAPTER)"; } && \
	LAMBDA_ADAPTER="$(ADAPTER)/bin/lambda-adapter" $(RUN) pytest tests/adapter

bench: setup  ## Measure what the service adds to the model's time, beside other gateways; ARGS=--quick, or ARGS="--only streams"
	@$(RUN) python tests/bench/run.py $(ARGS)

batches: setup  ## Measure the batch engine's lines a second and peak memory; ARGS="--storm 10000" tries all that can go wrong
	@$(RUN) python tests/bench/batches.py $(ARGS)

soak: setup  ## Run N (default 10000) mixed requests with faults, and account for every one of them
	@$(RUN) env PYTHONPATH=tests python tests/bench/soak.py --requests $(or $(N),10000)
