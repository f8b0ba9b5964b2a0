"""Tests of the server need its extra."""

from importlib.util import find_spec

PROXY = ["test_proxy.py", "test_proxy_models.py"]
if any(find_spec(name) is None for name in ("aiohttp", "openai")):
    collect_ignore = PROXY
if any(find_spec(name) is None for name in ("prometheus_client", "starlette", "torch", "uvicorn")):
    collect_ignore_glob = ["test_*.py"]
