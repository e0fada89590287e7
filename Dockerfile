# syntax=docker/dockerfile:1
FROM python:3.11.14-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY runtime runtime
COPY simulator simulator
COPY service service
COPY migrations migrations
COPY evidence evidence
RUN python -m venv /opt/pitstop && /opt/pitstop/bin/pip install --no-cache-dir ".[service]"

FROM python:3.11.14-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin pitstop \
    && install -d -o pitstop -g pitstop /data
COPY --from=build /opt/pitstop /opt/pitstop
ENV PATH=/opt/pitstop/bin:$PATH PYTHONUNBUFFERED=1 PITSTOP_DATABASE_URL=sqlite:////data/pitstop.sqlite3
USER pitstop
WORKDIR /data
VOLUME /data
EXPOSE 8787
HEALTHCHECK --interval=10s --timeout=6s --start-period=15s --retries=3 CMD ["python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8787/healthz/ready', timeout=5).close()"]
ENTRYPOINT ["pitstop"]
# A container has to listen on all of its addresses; which of them the outside reaches is for its runner to decide.
# There is no authentication yet: publish the port on a loopback address only, as docker-compose.yml does.
CMD ["serve", "--host", "0.0.0.0", "--insecure-allow-remote", "--migrate"]
