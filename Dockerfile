# The image of `coppice launch --cluster kuberay` (docs/cluster.md), for nodes without or with GPUs:
#   docker build -t REGISTRY/coppice:1 .
#   docker build -t REGISTRY/coppice:1-gpu --build-arg EXTRA=gpu .
# A smaller torch for CPUs: --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
FROM debian:bookworm-slim
ARG EXTRA=cpu
ARG PIP_EXTRA_INDEX_URL
# Triton and torch.compile need a compiler, KubeRay's probes wget.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
# The first command installs the model packages.
RUN python3 -m venv /opt/coppice \
    && /opt/coppice/bin/pip install --no-cache-dir "/source[$EXTRA,ray]" \
    && PIP_NO_CACHE_DIR=1 /opt/coppice/bin/coppice launch --dry-run > /dev/null
# A login shell, as KubeRay may start one, forgets the PATH below.
RUN ln -s /opt/coppice/bin/coppice /opt/coppice/bin/ray /usr/local/bin/ \
    && useradd --uid 1000 --create-home coppice \
    && install -d -o 1000 -g 1000 /coppice /runs
ENV PATH=/opt/coppice/bin:$PATH NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /coppice
CMD ["coppice", "--help"]
