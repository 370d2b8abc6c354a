# syntax=docker/dockerfile:1
# Reward service. Build from the repository root: docker build -f deploy/docker/reward.Dockerfile .
FROM python:3.11.14-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/omnifleet/bin:$PATH
WORKDIR /src
RUN python -m venv /opt/omnifleet
COPY deploy/docker/locks/reward.lock reward.lock
RUN pip install --require-hashes --no-deps -r reward.lock
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY omnifleet/ omnifleet/
COPY recipes/ recipes/
COPY services/reward/ services/reward/
RUN pip install --no-deps . ./services/reward

FROM python:3.11.14-slim-bookworm
RUN useradd --uid 10001 --create-home omnifleet && install -d -o omnifleet -g omnifleet /runs
COPY --from=build /opt/omnifleet /opt/omnifleet
ENV PATH=/opt/omnifleet/bin:$PATH PYTHONUNBUFFERED=1
USER omnifleet
WORKDIR /home/omnifleet
VOLUME /runs
ENTRYPOINT ["omnifleet", "reward"]
CMD ["--help"]
