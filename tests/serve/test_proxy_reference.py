"""The reference of cascade.toml lists every field of the configuration, with its default."""

import json
import re
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from swiftsure.serve.proxy import config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "proxy-toml.md"

SECTIONS = {
    "The top": config.ProxyConfig,
    "`[[models]]`": config.UpstreamConfig,
    "`[models.confidence]`": config.ConfidenceConfig,
    "`[router]`": config.RouterConfig,
    "`[thinking]`": config.ThinkingConfig,
    "Verifiers and embeddings": config.EndpointConfig,
    "`[slices]`": config.SliceConfig,
    "`[audit]`": config.AuditConfig,
    "`[limits]`": config.LimitConfig,
}


def rows(title):
    """Return the default of each field that a section lists."""
    text = PAGE.read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE))


def shown(field):
    """Return a default as the page writes it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    if value is None:
        return "none"
    if isinstance(value, config.AuditConfig | config.LimitConfig):
        return "a table of defaults"
    if isinstance(value, dict):
        return "`{ " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in value.items()) + " }`"
    if isinstance(value, Path):
        value = str(value)
    return f"`{json.dumps(value)}`"


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_lists_every_field_with_its_default(title):
    fields = SECTIONS[title].model_fields
    assert rows(title) == {name: shown(field) for name, field in fields.items()}


def test_no_table_is_left_out():
    tables = {name for name in config.__all__ if name.endswith("Config")}
    assert tables == {table.__name__ for table in SECTIONS.values()}
