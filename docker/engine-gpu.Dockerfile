# vLLM's own CUDA image, which has NIXL, with the connector.
ARG VLLM_VERSION=v0.32.0

FROM python:3.11-slim-bookworm AS wheels

WORKDIR /src
COPY constraints/app.txt constraints/
RUN pip install --no-cache-dir -c constraints/app.txt hatchling
COPY pyproject.toml ./
COPY protos protos
COPY connector connector
RUN touch README.md && pip wheel --no-deps --no-build-isolation -w /wheels . ./connector


FROM vllm/vllm-openai:${VLLM_VERSION}

# The cache is the user's, and so is a new volume that is mounted there.
RUN useradd --uid 10001 --create-home kvtide && \
    install -d -o kvtide -g kvtide /home/kvtide/.cache /home/kvtide/.cache/huggingface

COPY --from=wheels /wheels /wheels
# vLLM's environment has what the connector needs; another grpcio or protobuf could break vLLM.
RUN python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl
COPY docker/engine docker/healthy /usr/local/bin/

USER kvtide
WORKDIR /home/kvtide
ENTRYPOINT ["engine"]
