# A server of certified models. `docker compose up` runs the demonstration; for a model of yours:
#   docker build -t swiftsure . && docker run -p 8000:8000 -v ./model:/model swiftsure /model

FROM python:3.12-slim

# Which extras of pyproject.toml: `onnx` alone serves exported folders without PyTorch.
ARG EXTRAS=serve,torch
# More options of pip, such as where to find builds of PyTorch for the CPU alone.
ARG PIP_OPTIONS=""

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir $PIP_OPTIONS -c constraints.txt ".[$EXTRAS]"
RUN mkdir -p /state && chown nobody /state

USER nobody
ENV HOME=/tmp
EXPOSE 8000
HEALTHCHECK CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"
ENTRYPOINT ["swiftsure", "serve", "--host", "0.0.0.0"]
CMD ["--demo"]
