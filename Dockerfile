# specdec serve in a container; by default the bundled pair on the CPU
#
#   docker build -t specdec .
#   docker build -t specdec:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run --rm -p 8000:8000 specdec
#   docker run --rm -p 8000:8000 --gpus all -v models:/models specdec:cuda --target /models/NAME --drafter /models/DRAFTER
#
# docs/deployment.md has the rest
FROM python:3.12-slim

# the build of torch: .../whl/cpu, or one for CUDA
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# on a GPU Triton compiles the launchers of its kernels with a C compiler
RUN case "$TORCH_INDEX" in \
        */cpu) ;; \
        *) apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* ;; \
    esac

WORKDIR /src

# torch is a layer of its own, so that a change of the source does not fetch it again
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple torch

COPY pyproject.toml README.md LICENSE ./
COPY kvcache kvcache
COPY attention attention
COPY draft_models draft_models
COPY specdec specdec
RUN pip install --no-cache-dir -c constraints.txt ".[serve]" && rm -rf build

# an unprivileged user; its home holds what is downloaded and compiled
RUN useradd --uid 10001 --create-home specdec
USER specdec
WORKDIR /home/specdec
ENV HF_HOME=/home/specdec/.cache/huggingface \
    TRITON_CACHE_DIR=/home/specdec/.cache/triton \
    PYTHONUNBUFFERED=1 \
    MALLOC_ARENA_MAX=8 \
    MALLOC_MMAP_THRESHOLD_=1048576 \
    MALLOC_TRIM_THRESHOLD_=1048576

EXPOSE 8000
# of the port that the entry point has; a large model takes minutes to load
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

ENTRYPOINT ["specdec", "serve", "--host", "0.0.0.0", "--port", "8000"]
