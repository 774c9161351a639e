# vLLM on CPU with the connector and a small model. What is big is installed before any source is copied.
FROM python:3.11-slim-bookworm AS vllm

ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/kvtide

RUN apt-get update && \
    apt-get install -y --no-install-recommends libnuma1 && \
    rm -rf /var/lib/apt/lists/*

COPY requirements/engine.txt requirements/
COPY constraints/engine.txt constraints/
COPY scripts/install scripts/
COPY pyproject.toml ./
COPY connector/pyproject.toml connector/
# An installation in place looks for the README and the package, but not into them.
RUN touch README.md && install -D /dev/null connector/kvtide_connector/__init__.py && scripts/install engine


FROM vllm AS model

COPY scripts/make-model scripts/
RUN .venv-engine/bin/python scripts/make-model /models/SmolLM2-135M-Instruct && chmod -R a+rX /models


FROM vllm

ENV PATH=/opt/kvtide/.venv-engine/bin:$PATH
RUN useradd --uid 10001 --create-home kvtide

COPY --from=model /models /models
COPY docker/engine docker/healthy /usr/local/bin/
COPY protos protos
COPY connector connector

USER kvtide
ENTRYPOINT ["engine"]
