# Quire on a CPU: docker build -f docker/cpu.Dockerfile -t quire:cpu .
FROM debian:bookworm-slim AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir --constraint constraints.txt --extra-index-url "$TORCH_INDEX" torch
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY csrc ./csrc
COPY quire ./quire
RUN /opt/quire/bin/pip install --no-cache-dir --constraint constraints.txt --extra-index-url "$TORCH_INDEX" .

FROM debian:bookworm-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 quire \
    && install -d -o quire -g quire /models
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH HF_HOME=/models
USER 1000:1000
WORKDIR /home/quire
VOLUME /models
EXPOSE 8000
# Healthy once the model is loaded; an engine that is down answers 503.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --start-interval=2s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["quire"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
