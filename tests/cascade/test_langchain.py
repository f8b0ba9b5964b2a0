"""A policy in LangChain's chains, with the real langchain-core and stand-in chat models."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest

import swiftsure as ss

pytest.importorskip("langchain_core")

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate

from swiftsure.cascade.langchain import LangChainModel, as_runnable


class Chat(BaseChatModel):
    """Says whether a number is odd, as a provider's chat model would; the small one may err."""

    model_name: str
    asked: list[Any]

    @property
    def _llm_type(self):
        return "stand-in"

    @classmethod
    def is_lc_serializable(cls):
        return True

    def _generate(self, messages, stop=None, run_manager=None, **more):
        self.asked.append(messages)
        number = int(str(messages[-1].content).split()[-1])
        unsure = self.model_name == "small" and number % 5 == 0
        text = "odd" if (number % 2) != unsure else "even"
        token = {"token": text, "logprob": math.log(0.4 if unsure else 0.95)}
        message = AIMessage(
            text,
            response_metadata={
                "model_name": f"{self.model_name}-2026",
                "system_fingerprint": "fp",
                "logprobs": {"content": [token]} if more.get("logprobs") else None,
            },
            usage_metadata={"input_tokens": 10, "output_tokens": 1, "total_tokens": 11},
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


@pytest.fixture
def cascade():
    small = Chat(model_name="small", asked=[])
    large = Chat(model_name="large", asked=[])
    return ss.Cascade(
        [
            LangChainModel(small.bind(logprobs=True), per_million=(1, 1)),
            LangChainModel(large, per_million=(10, 10)),
        ]
    )


@pytest.fixture
def policy(cascade):
    record = cascade.collect([f"Is it odd? {k}" for k in range(200)], progress=False)
    assert record.confidences["confidence"][:, 0].min() == np.float32(0.4)
    return cascade.calibrate(record, risk="consistency", epsilon=0.05)


def test_names_costs_versions_and_identity(cascade, policy):
    assert cascade.names == ["small", "large"]
    assert policy.settings["versions"]["small"] == ["small-2026 fp"]
    assert cascade.fingerprint is not None
    found = cascade.run(policy)(["Is it odd? 7"]).decisions[0]
    assert found.cost == {"usd": 11 / 1e6, "tokens": 11.0}


def test_a_cascade_in_a_chain(cascade, policy):
    prompt = ChatPromptTemplate.from_messages([("user", "Is it odd? {number}")])
    step = as_runnable(cascade.run(policy))
    chain = prompt | step | StrOutputParser()
    assert chain.invoke({"number": 7}) == "odd"
    assert chain.batch([{"number": 5}, {"number": 8}]) == ["odd", "even"]
    message = (prompt | step).invoke({"number": 5})
    about = message.response_metadata["swiftsure"]
    assert (about["model"], about["exit"], about["reason"]) == ("large", 1, None)
    assert about["confidence"] == pytest.approx(0.4)
    assert about["cost"]["usd"] == pytest.approx(121 / 1e6)
    assert message.response_metadata["model_name"] == "large-2026"


def test_it_runs_in_event_loops_one_after_another(cascade, policy):
    step = as_runnable(cascade.run(policy))
    for _ in range(2):
        assert asyncio.run(step.ainvoke("Is it odd? 9")).content == "odd"


def test_connections_of_a_call_are_closed(cascade, policy):
    closed = []

    async def close():
        closed.append(True)

    cascade.models[1].close = close
    as_runnable(cascade.run(policy)).invoke("Is it odd? 7")
    assert closed == [True]


def test_messages_unlike_the_calibration_go_to_the_last_model(cascade, policy):
    step = as_runnable(cascade.run(policy))
    found = step.invoke([SystemMessage("One word."), HumanMessage("Is it odd? 7")])
    about = found.response_metadata["swiftsure"]
    assert about["model"] == "large"
    assert "no such system prompt" in about["reason"]
    assert len(cascade.models[1].model.asked[-1]) == 2


def test_callbacks_of_a_chain_see_its_models(cascade, policy):
    class Seen(BaseCallbackHandler):
        starts = 0

        def on_chat_model_start(self, *_, **__):
            self.starts += 1

    seen = Seen()
    as_runnable(cascade.run(policy)).invoke("Is it odd? 5", config={"callbacks": [seen]})
    assert seen.starts == 2  # the small model, and then the large one
