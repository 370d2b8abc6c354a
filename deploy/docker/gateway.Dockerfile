# syntax=docker/dockerfile:1
# Gateway: the rollout distribution without an engine. Build from the repository root: docker build -f deploy/docker/gateway.Dockerfile .
FROM python:3.11.14-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/omnifleet/bin:$PATH
WORKDIR /src
RUN python -m venv /opt/omnifleet
COPY deploy/docker/locks/gateway.lock gateway.lock
RUN pip install --require-hashes --no-deps -r gateway.lock
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY omnifleet/ omnifleet/
COPY recipes/ recipes/
COPY services/rollout/ services/rollout/
RUN pip install --no-deps . ./services/rollout

FROM python:3.11.14-slim-bookworm
RUN useradd --uid 10001 --create-home omnifleet && install -d -o omnifleet -g omnifleet /runs
COPY --from=build /opt/omnifleet /opt/omnifleet
ENV PATH=/opt/omnifleet/bin:$PATH PYTHONUNBUFFERED=1
USER omnifleet
WORKDIR /home/omnifleet
VOLUME /runs
ENTRYPOINT ["omnifleet", "gateway"]
CMD ["--help"]
