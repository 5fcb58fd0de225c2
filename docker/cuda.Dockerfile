# Quire on an NVIDIA GPU: docker build -f docker/cuda.Dockerfile -t quire:cuda .
# The base has nvcc and g++, because kernels are built for the GPU and the model at the first start (kept in /models/kernels).
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && userdel --remove ubuntu \
    && useradd --create-home --uid 1000 quire \
    && install -d -o quire -g quire /models
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY csrc ./csrc
COPY quire ./quire
RUN /opt/quire/bin/pip install --no-cache-dir --constraint constraints.txt . \
    && rm -rf /src/build
ENV PATH=/opt/quire/bin:$PATH HF_HOME=/models QUIRE_CACHE_DIR=/models/kernels TRITON_CACHE_DIR=/models/kernels/triton
USER 1000:1000
WORKDIR /home/quire
VOLUME /models
EXPOSE 8000
# Healthy once the model is loaded; an engine that is down answers 503.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --start-interval=2s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["quire"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
