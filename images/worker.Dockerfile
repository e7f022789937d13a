# The worker, for CPUs:     docker build -f images/worker.Dockerfile -t encodepool/worker:0.1.0-cpu .
# for GPUs, CUDA 13 or 12:  add  --build-arg EXTRA=worker-cuda13  or  worker-cuda12
# CUDA comes with the Python packages; of the node only the driver is needed.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG EXTRA=worker
# Empty: torch's CPU or CUDA 12 build from PyTorch's own index, its CUDA 13 build from PyPI.
# pypi: always from PyPI, where a CPU image works as well, but is gigabytes larger.
ARG TORCH_BACKEND=
ARG VENV=/opt/encodepool
ENV UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy
WORKDIR /src
COPY images/install.sh images/
COPY scripts/setup.sh scripts/
RUN sh images/install.sh uv
# What changes rarely comes first: the dependencies are a layer of their own.
COPY requirements/run.txt requirements/
COPY pyproject.toml ./
RUN --mount=type=cache,target=/var/cache/uv sh images/install.sh dependencies "${EXTRA}" "${VENV}"
COPY README.md LICENSE ./
COPY operator operator
COPY worker worker
RUN --mount=type=cache,target=/var/cache/uv sh images/install.sh project "${VENV}"
RUN sh images/install.sh bytecode "${EXTRA}" "${VENV}"

FROM ${BASE}
ARG EXTRA=worker
ARG VENV=/opt/encodepool
COPY images/install.sh /tmp/
RUN sh /tmp/install.sh libraries "${EXTRA}" && rm -rf /var/lib/apt/lists/* /tmp/install.sh
COPY --from=build ${VENV} ${VENV}
# Which GPUs a pod may use is the device plugin's to say, so NVIDIA_VISIBLE_DEVICES is not set.
ENV PATH=${VENV}/bin:${PATH} \
    LD_LIBRARY_PATH=${VENV}/lib/cuda \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# A number, so that a cluster can see that it is not root's.
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["encodepool-worker"]
CMD ["serve"]
