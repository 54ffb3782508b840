"""Usage as the real packages of OpenAI and Anthropic report it, from a server on loopback."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive, current
from maestro_hive.engine.prices import MADE, Prices, default_prices, read_prices
from maestro_hive.engine.usage import Usage, usage_in
from maestro_hive.kernel.errors import ConfigurationError
from tests.hive.model_server import model_server
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OPENAI, CLAUDE = "gpt-of-tests-2030-01-01", "claude-of-tests-20300101"
PRICES = {
    "gpt-of-tests": {"input": 2.5, "output": 10, "cached": 1.25},
    "claude-of-tests": {"input": 3, "output": 15, "cached": 0.3, "cache_write": 3.75},
}
#: Of 100 tokens of input 60 were cached.
OPENAI_USED = (60, 60)
#: 40 of input, 7 written to a cache, 20 of output; 60 were read from a cache.
CLAUDE_USED = (67, 60)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with model_server() as found:
        yield found


def openai_client(address: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.AsyncOpenAI(api_key="none", base_url=f"{address}/v1", max_retries=0)


def anthropic_client(address: str) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.AsyncAnthropic(api_key="none", base_url=address, max_retries=0)


async def chat(address: str) -> Any:
    async with openai_client(address) as client:
        return await client.chat.completions.create(
            model=OPENAI, messages=[{"role": "user", "content": "hi"}]
        )


async def respond(address: str) -> Any:
    async with openai_client(address) as client:
        return await client.responses.create(model=OPENAI, input="hi")


async def message(address: str) -> Any:
    async with anthropic_client(address) as client:
        return await client.messages.create(
            model=CLAUDE, max_tokens=50, messages=[{"role": "user", "content": "hi"}]
        )


async def as_dict(address: str) -> Any:
    return (await message(address)).model_dump()


async def in_dict(address: str) -> Any:
    found = await chat(address)
    return {"text": "hello", "model": found.model, "usage": found.usage}


async def spent_usage(address: str) -> str:
    found = await message(address)
    current().spend(usage=found)
    return "hello"


async def spent_and_returned(address: str) -> Any:
    """What calls ``spend`` is not read for usage as well."""
    found = await chat(address)
    current().spend(usage=found.usage, model=found.model)
    return found


async def streamed_chat(address: str) -> str:
    async with openai_client(address) as client:
        stream = await client.chat.completions.create(
            model=OPENAI,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        return "".join(
            [
                choice.delta.content or ""
                async for chunk in current().metered(stream)
                for choice in chunk.choices
            ]
        )


async def streamed_response(address: str) -> int:
    async with openai_client(address) as client:
        stream = await client.responses.create(model=OPENAI, input="hi", stream=True)
        return len([event async for event in current().metered(stream)])


async def streamed_message(address: str) -> int:
    async with anthropic_client(address) as client:
        stream = await client.messages.create(
            model=CLAUDE, max_tokens=50, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        return len([event async for event in current().metered(stream)])


async def streamed_by_its_helper(address: str) -> Any:
    async with (
        anthropic_client(address) as client,
        client.messages.stream(
            model=CLAUDE, max_tokens=50, messages=[{"role": "user", "content": "hi"}]
        ) as stream,
    ):
        return await stream.get_final_message()


CALLS: list[tuple[Callable[[str], Any], tuple[int, int], str]] = [
    (chat, OPENAI_USED, OPENAI),
    (respond, OPENAI_USED, OPENAI),
    (message, CLAUDE_USED, CLAUDE),
    (as_dict, CLAUDE_USED, CLAUDE),
    (in_dict, OPENAI_USED, OPENAI),
    (spent_usage, CLAUDE_USED, CLAUDE),
    (spent_and_returned, OPENAI_USED, OPENAI),
    (streamed_chat, OPENAI_USED, OPENAI),
    (streamed_response, OPENAI_USED, OPENAI),
    (streamed_message, CLAUDE_USED, CLAUDE),
    (streamed_by_its_helper, CLAUDE_USED, CLAUDE),
]
#: 40 tokens at 2.50 dollars for a million, 20 at 10, 60 at 1.25; and 40 at 3, 20 at 15, 7 at 3.75, 60 at 0.30.
DOLLARS = {OPENAI: 0.000375, CLAUDE: 0.000465}


@pytest.mark.parametrize("call, used, model", CALLS, ids=lambda it: getattr(it, "__name__", ""))
def test_the_usage_of_a_real_response_is_counted_exactly_once(
    call: Callable[[str], Any], used: tuple[int, int], model: str, address: str, tmp_path: Path
) -> None:
    with Hive(tmp_path, prices=PRICES) as hive:
        step = hive.step(persona="writer", name="ask", max_attempts=1)(call)

        @hive.workflow
        async def write() -> None:
            await step(address)

        hive.run_sync(write, run_id="r")
        hive.run_sync(write, run_id="r")
        for view in hive.budget.spent():
            assert (view.tokens, view.cached_tokens) == used, view
        (spent,) = hive._open().accounts("model")
    assert (spent.calls, spent.tokens, spent.cached, spent.name) == (1, *used, model)
    assert spent.usd == pytest.approx(DOLLARS[model] * 1e6, abs=1)


# --- shapes --------------------------------------------------------------------------------------

SHAPES: list[tuple[object, Usage | None]] = [
    ({"tokens_used": 60}, Usage(60)),
    ({"tokens_used": 60, "usage": {"total_tokens": 60}}, Usage(60)),
    ({"usage": {"total_tokens": 60}}, Usage(60)),
    ({"usage": {"prompt_tokens": 40, "completion_tokens": 20}}, Usage(60, 0, 40, 20)),
    ({"usage": {"input_tokens": 40, "output_tokens": 20}}, Usage(60, 0, 40, 20)),
    ({"usage": SimpleNamespace(input_tokens=40, output_tokens=20)}, Usage(60, 0, 40, 20)),
    (SimpleNamespace(tokens_used=60, model="m"), Usage(60, model="m")),
    ({"total_cost_usd": 0.25, "usage": {"input_tokens": 5}}, Usage(5, 0, 5, usd=250_000)),
    ({"total_cost_usd": 0.25}, Usage(usd=250_000)),
    ({"usage": None}, None),
    ({"usage": {}}, None),
    ({"usage": {"total_tokens": -1}}, None),
    ({"usage": {"total_tokens": True}}, None),
    ({"tokens_used": "60"}, None),
    ("text", None),
    ([{"tokens_used": 60}], None),
    (None, None),
]


@for_each("result, usage", SHAPES)
def test_usage_is_read_from_what_results_look_like(result: object, usage: Usage | None) -> None:
    assert usage_in(result) == usage


# --- prices --------------------------------------------------------------------------------------


def test_prices_have_a_date_and_know_versions_of_a_model() -> None:
    prices = default_prices()
    assert prices.made == MADE
    known = prices.of("gpt-4o")
    assert known is not None
    assert prices.of("gpt-4o-2024-08-06") == prices.of("gpt-4o-latest") == known
    assert prices.of("gpt-4o-of-my-own") is None
    assert known.cost(Usage(1_000_000, 0, 1_000_000)) == 2_500_000
    assert known.cost(Usage(1, 0, 1)) == 3, "rounded up"
    assert known.cost(Usage(tokens=1_000_000)) == 10_000_000, "not known what: the higher price"


def test_prices_are_replaced_by_a_table_or_a_file(tmp_path: Path) -> None:
    table = {"mine": {"input": 1, "output": 2}}
    path = tmp_path / "prices.json"
    path.write_text('{"made": "2026-01-01", "models": {"mine": {"input": 1, "output": 2}}}')
    for given in (table, Prices(table), path, str(path)):
        found = read_prices(given)
        price = found.of("mine")
        assert price is not None
        assert tuple(price) == (10**6, 2 * 10**6, 10**6, 10**6)
        assert found.of("gpt-4o") is None
    assert read_prices(path).made == "2026-01-01"


@for_each(
    "given", [{"m": 3}, {"m": {"input": 1}}, {"m": {"input": -1, "output": 1}}, 7, "no-such-file"]
)
def test_prices_that_are_none_are_refused(given: object) -> None:
    with pytest.raises(ConfigurationError, match="price"):
        read_prices(given)
