"""An OpenAI-compatible proxy in front of certified cascades, and of models that think.

| module | contents |
|---|---|
| `config` | `ProxyConfig`: a cascade.toml |
| `app` | `create_proxy`: the web application |
| `requests` | which requests the policy covers |
| `upstreams` | asks the models in turn |
| `thinking` | lets one model think until its answer is safe |
| `streams` | the last model's stream, passed on |
| `audits` | asks the last model about a share of the requests, off the request path |
"""

from swiftsure.serve.proxy.app import create_proxy
from swiftsure.serve.proxy.config import AuditConfig, LimitConfig, ProxyConfig

__all__ = ["AuditConfig", "LimitConfig", "ProxyConfig", "create_proxy"]
