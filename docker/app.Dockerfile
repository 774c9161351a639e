# The services and the gateway. Their packages are installed in place, before their sources are copied: a changed source
# installs nothing anew.
FROM python:3.11-slim-bookworm

ENV PATH=/opt/kvtide/.venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /opt/kvtide

# The directory of the key is the user's, and so is a new volume that is mounted there.
RUN useradd --uid 10001 --create-home kvtide && install -d -o kvtide -g kvtide -m 700 /run/kvtide

COPY constraints/app.txt constraints/
COPY pyproject.toml ./
COPY services/pyproject.toml services/
COPY gateway/pyproject.toml gateway/
# An installation in place looks for the README and the packages, but not into them.
RUN touch README.md && \
    install -D /dev/null services/kvtide_services/__init__.py && \
    install -D /dev/null gateway/kvtide_gateway/__init__.py && \
    python -m venv .venv && \
    pip install -c constraints/app.txt pip hatchling editables && \
    pip install -c constraints/app.txt --no-build-isolation -e . -e ./services -e ./gateway

COPY docker/healthy /usr/local/bin/
COPY protos protos
COPY services services
COPY gateway gateway

USER kvtide
ENTRYPOINT ["kvtide"]
