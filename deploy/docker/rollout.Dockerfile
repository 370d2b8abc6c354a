# syntax=docker/dockerfile:1
# Rollout worker: one vLLM engine on CUDA. Build from the repository root: docker build -f deploy/docker/rollout.Dockerfile .
# The development image, not the runtime one: Triton and other kernels are compiled on first use.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive PATH=/opt/omnifleet/bin:$PATH
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 python3.12-dev python3.12-venv libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/omnifleet
WORKDIR /src
COPY deploy/docker/locks/rollout.lock rollout.lock
RUN pip install --require-hashes --no-deps -r rollout.lock
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY omnifleet/ omnifleet/
COPY recipes/ recipes/
COPY lib/refit/ lib/refit/
COPY services/rollout/ services/rollout/
RUN pip install --no-deps . ./lib/refit ./services/rollout \
    && useradd --uid 10001 --create-home omnifleet \
    && install -d -o omnifleet -g omnifleet /runs
ENV PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NCCL_NVLS_ENABLE=0 \
    VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1
USER omnifleet
WORKDIR /home/omnifleet
VOLUME /runs
ENTRYPOINT ["omnifleet", "rollout"]
CMD ["--help"]
