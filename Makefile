# Everything that people and CI run. `make` lists it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
CACHE := $(or $(KVTIDE_CACHE_DIR),.cache)
MODEL := $(CACHE)/models/SmolLM2-135M-Instruct
PROTOS := $(shell cd protos && find kvtide -name '*.proto' | sort)
PACKAGES := kvtide kvtide_services kvtide_gateway kvtide_connector kvtide_bench

.PHONY: help install app demo up test check fmt protos protos-check vllm-surface clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

install: app ## both environments and the model; skips what is up to date
	@scripts/install engine
	@.venv-engine/bin/python scripts/make-model $(MODEL)

app: # enough for what runs no engine
	@scripts/install app

demo: install ## a conversation on real engines, reuse off and on: table, charts, JSON
	@.venv/bin/kvtide demo

up: install ## a whole deployment on one port until Ctrl-C
	@.venv/bin/kvtide up

test: install ## all tests, on real engines too
	@.venv/bin/python -m pytest

check: app protos-check ## format, lint, types, stubs
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	@for p in $(PACKAGES); do .venv/bin/mypy -p $$p || exit 1; done

fmt: app ## format and fix
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

define GENERATE
	.venv/bin/python -m grpc_tools.protoc -Iprotos --python_out=$(1) --grpc_python_out=$(1) \
	  --plugin=protoc-gen-mypy=.venv/bin/protoc-gen-mypy --mypy_out=quiet:$(1) \
	  --plugin=protoc-gen-mypy_grpc=.venv/bin/protoc-gen-mypy_grpc --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

protos: app ## regenerate the stubs
	$(call GENERATE,protos)

protos-check: app ## fail when the committed stubs differ from the protos
	@rm -rf .cache/stubs && mkdir -p .cache/stubs
	@$(call GENERATE,.cache/stubs)
	@for f in $$(cd .cache/stubs && find . -name '*_pb2*' | sort); do \
	  diff -q ".cache/stubs/$$f" "protos/$$f" || { echo "run make protos" >&2; exit 1; }; done

vllm-surface: app ## extract what the connector relies on from vLLM's releases
	.venv/bin/python connector/tools/vllm_surface.py --out connector/tools/vllm_surface.json 0.31.0 0.32.0 0.33.0

clean: ## remove environments, model, results, caches
	rm -rf .venv .venv-engine .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
