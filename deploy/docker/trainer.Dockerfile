# syntax=docker/dockerfile:1
# Trainer service: NeMo AutoModel on CUDA. Build from the repository root: docker build -f deploy/docker/trainer.Dockerfile .
# The development image, not the runtime one: Triton and other kernels are compiled on first use.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive PATH=/opt/omnifleet/bin:$PATH
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 python3.12-dev python3.12-venv libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/omnifleet
WORKDIR /src
COPY deploy/docker/locks/trainer.lock trainer.lock
RUN pip install --require-hashes --no-deps -r trainer.lock
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY omnifleet/ omnifleet/
COPY recipes/ recipes/
COPY lib/refit/ lib/refit/
COPY services/trainer/ services/trainer/
RUN pip install --no-deps . ./lib/refit ./services/trainer \
    && useradd --uid 10001 --create-home omnifleet \
    && install -d -o omnifleet -g omnifleet /runs
ENV PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NCCL_NVLS_ENABLE=0
USER omnifleet
WORKDIR /home/omnifleet
VOLUME /runs
ENTRYPOINT ["omnifleet", "trainer"]
CMD ["--help"]
