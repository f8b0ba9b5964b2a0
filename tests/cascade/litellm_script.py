"""Runs a cascade within LiteLLM, and prints what happened as JSON: see test_litellm.py."""

import asyncio
import json
import sys

import litellm

import swiftsure as ss
from swiftsure.cascade.litellm import LiteLLMModel, custom_llm

SMALL, LARGE = sys.argv[1:]
HEADER = "llm_provider-x-swiftsure-model"
PARAMETERS = {"temperature": 0, "max_tokens": 9}


def model(name, place, price):
    parameters = {**PARAMETERS, "api_base": place, "api_key": "none"}
    return LiteLLMModel(
        f"openai/{name}", parameters=parameters, logprobs=2, per_million=(price, price)
    )


def messages(number, *before):
    return [*before, {"role": "user", "content": f"Is it odd? {number}"}]


def said(response):
    return response.choices[0].message.content


def by(response):
    return response._hidden_params["additional_headers"][HEADER].split("/")[-1]


cascade = ss.Cascade([model("small", SMALL, 1), model("large", LARGE, 10)])
record = cascade.collect([f"Is it odd? {k}" for k in range(200)], progress=False)
policy = cascade.calibrate(record, risk="consistency", epsilon=0.05)
runner = cascade.run(policy)
decisions = runner(["Is it odd? 7", "Is it odd? 5"]).decisions
found = {
    "record": record.n,
    "threshold": policy.threshold,
    "decisions": [[each.answer.answer, each.exit] for each in decisions],
}

handler = custom_llm(runner)
litellm.custom_provider_map = [{"provider": "swiftsure", "custom_handler": handler}]
NAME = "swiftsure/cascade"
router = litellm.Router([{"model_name": "cheap", "litellm_params": {"model": NAME}}])


def table(responses):
    return {"texts": [said(each) for each in responses], "models": [by(e) for e in responses]}


async def later(ask, name):
    return [await ask(model=name, messages=messages(k)) for k in (7, 5, 8)]


responses = [litellm.completion(NAME, messages(k)) for k in (7, 5, 8)]
found["completion"] = table(responses)
found["acompletion"] = table(asyncio.run(later(litellm.acompletion, NAME)))
found["router"] = table(asyncio.run(later(router.acompletion, "cheap")))
found["costs"] = [responses[k]._hidden_params["response_cost"] for k in (1, 0)]
parts = litellm.completion(NAME, messages(7), stream=True)
found["stream"] = "".join(each.choices[0].delta.content or "" for each in parts)
system = {"role": "system", "content": "One word."}
found["other"] = [
    by(litellm.completion(NAME, messages(7), temperature=0.9)),
    by(litellm.completion(NAME, messages(7, system))),
    by(litellm.completion(NAME, messages(7), temperature=0)),
]
print(json.dumps(found))
