"""An OpenAI-compatible proxy in front of a certified cascade of language models.

| module | contents |
|---|---|
| `config` | `ProxyConfig`: a cascade.toml |
| `app` | `create_proxy`: the web application |
| `requests` | checks requests; errors in the form that OpenAI's clients expect |
| `asking` | asks the models in turn |
| `streams` | server-sent events, to and from |
| `audits` | asks the last model about a share of the requests, off the request path |
"""

from swiftsure.serve.proxy.app import create_proxy
from swiftsure.serve.proxy.config import AuditConfig, LimitConfig, ProxyConfig

__all__ = ["AuditConfig", "LimitConfig", "ProxyConfig", "create_proxy"]
