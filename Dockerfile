# Two images of docker-compose.yml, neither of which runs as root: `stack` has our packages and the orchestrators,
# `node` is a plain machine with sshd. docs/compose.md describes them.

FROM python:3.13.9-slim-bookworm AS base
RUN useradd --uid 1000 --create-home --shell /bin/bash skyward && install -d -o skyward -g skyward /app /data
WORKDIR /app

# ── packages, at the versions of uv.lock ─────────────────────────────────────────────────────────────────────────────

FROM base AS packages
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never UV_PYTHON=/usr/local/bin/python
RUN pip install --no-cache-dir uv==0.13.8
COPY pyproject.toml uv.lock README.md LICENSE ./
RUN uv sync --locked --no-default-groups --group stack --extra all --no-install-project --no-cache
COPY skyward_core skyward_core
COPY integrations integrations
# the version comes from the git tag, and git is not in the image
ARG VERSION=0.1.0
RUN SETUPTOOLS_SCM_PRETEND_VERSION="$VERSION" uv sync --locked --no-default-groups --group stack --extra all --no-editable --no-cache

# ── a node ───────────────────────────────────────────────────────────────────────────────────────────────────────────

FROM base AS node
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && install -d -o skyward -g skyward /data/node-keys /data/node-1 /data/node-2
COPY stack/node.sh stack/node.sh
USER 1000:1000
CMD ["bash", "stack/node.sh"]

# ── our image ────────────────────────────────────────────────────────────────────────────────────────────────────────

FROM base AS stack
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o skyward -g skyward /data/client-keys /data/node-keys /data/airflow /data/dagster /data/prefect
COPY --from=packages /app/.venv .venv
COPY stack stack
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1
USER 1000:1000
CMD ["skyward", "doctor"]
