# The operator:  docker build -f images/operator.Dockerfile -t encodepool/operator:0.1.0 .
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG VENV=/opt/encodepool
ENV UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy
WORKDIR /src
COPY images/install.sh images/
COPY scripts/setup.sh scripts/
RUN sh images/install.sh uv
# What changes rarely comes first: the dependencies are a layer of their own.
COPY requirements/run.txt requirements/
COPY pyproject.toml ./
RUN --mount=type=cache,target=/var/cache/uv sh images/install.sh dependencies operator "${VENV}"
COPY README.md LICENSE ./
COPY operator operator
COPY worker worker
RUN --mount=type=cache,target=/var/cache/uv sh images/install.sh project "${VENV}"
RUN sh images/install.sh bytecode operator "${VENV}"

FROM ${BASE}
ARG VENV=/opt/encodepool
COPY --from=build ${VENV} ${VENV}
ENV PATH=${VENV}/bin:${PATH} \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# A number, so that a cluster can see that it is not root's.
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080
ENTRYPOINT ["encodepool-operator"]
CMD ["run"]
