"""A step as it was declared, and the plan of one call: its input encoded and hashed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from maestro_hive.engine.options import StepOptions
from maestro_hive.engine.parameters import Given, Parameters, is_in_class
from maestro_hive.engine.result_types import result_check
from maestro_hive.engine.retry_policy import Rules, is_async
from maestro_hive.engine.source import check_source
from maestro_hive.journal import values
from maestro_hive.kernel.errors import ConfigurationError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from maestro_hive.engine.config import ExecutionConfig


class StepDefinition:
    """A function as a step: its options, checked, with what follows from them and a config."""

    def __init__(
        self,
        body: Callable[..., Any],
        given: Mapping[str, Any],
        config: ExecutionConfig,
    ) -> None:
        if isinstance(body, staticmethod | classmethod):
            kind = type(body).__name__
            raise ConfigurationError(f"put @hive.step below @{kind}, not above it")
        self.body, self.config, self._given = body, config, dict(given)
        self.options = options = StepOptions.declared(_name_of(body), dict(given))
        self.name, self.persona = options.name, options.persona
        #: Names it among all steps: its limits are called like this.
        self.label = f"{options.persona}/{options.name}" if options.persona else options.name
        self.parameters = Parameters(
            body, options.name, options.ignore, options.redact, options.key
        )
        self.is_async = is_async(body)
        self.is_method = is_in_class(body)
        self.rules = Rules(options.limit(config), config, options.retry_on)
        self.timeout: float = options.timeout or config.timeout_seconds
        interruptions = options.max_interruptions
        self.max_interruptions: int = (
            config.level1.max_interruptions if interruptions is None else interruptions
        )
        stored = options.store_streams
        self.store_streams = config.state.store_streams if stored is None else stored
        self._check_result = result_check(options.returns, body, f"step {options.name!r}: returns")
        #: What is stored with each attempt.
        self.recorded_options = options.recorded()

    def named(self, name: str) -> StepDefinition:
        """Return the definition of another step, with this body and these options."""
        given = {**self._given, "name": name}
        return StepDefinition(self.body, given, self.config)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return one call: bound, encoded and hashed."""
        given, key = Given(list(args), kwargs), None
        if kwargs or len(args) != self.parameters.arity:
            given, key = self.parameters.bind(args, kwargs)
        try:
            encoded = values.encode_call(given.args, given.kwargs, "input")
        except EncodeError as error:
            if key is None:
                raise self.parameters.unencodable(error) from error.__cause__
            return Call(given, key, None, self.label)
        return Call(given, key, encoded, f"{self.label}:{encoded.digest.hex()[:16]}")

    def earlier_contents(self, call: Call) -> Iterator[str]:
        """Yield the contents by which earlier code, with other defaults, recorded the call."""
        if call.input is not None and call.key is None:
            for args, kwargs in self.parameters.earlier(call.input.args, call.input.kwargs):
                yield f"{self.label}:{values.digest_of_call(args, kwargs).hex()[:16]}"

    def check(self, result: Any) -> None:
        """Raise if a result is not what the step declares."""
        if self.options.check_source and isinstance(result, str):
            check_source(result)
        if self._check_result is not None:
            self._check_result(result)


class Call(msgspec.Struct, frozen=True, eq=False):
    """One call of a step, wherever it is made."""

    given: Given
    key: str | None
    #: The arguments, encoded; None if they cannot be.
    input: values.EncodedCall | None
    #: Persona, name and digest of the input: equal calls have equal contents.
    content: str


class Plan(msgspec.Struct, frozen=True, eq=False):
    """One call of a step in a run, by its identity."""

    definition: StepDefinition
    run_id: str
    identity: str
    call: Call

    @property
    def effect_key(self) -> str:
        """Return a name of the effect that is the same in all attempts and lives."""
        return f"{self.run_id}/{self.identity}"

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments for one attempt: values of its own, and as they are those left out."""
        given = self.call.given
        args, kwargs = list(given.args), dict(given.kwargs)
        if self.call.input is not None:
            args, kwargs = self.call.input.take()
        if given.left_out or given.unnamed:
            args, kwargs = given.complete(args, kwargs)
        for name in self.definition.parameters.by_place:
            args.append(kwargs.pop(name))
        return args, kwargs

    def stored_input(self) -> bytes | None:
        """Return the input as it is stored; None if it is not."""
        definition, call = self.definition, self.call
        if not definition.options.store_input or call.input is None:
            return None
        if not definition.options.redact:
            return call.input.text()
        args, kwargs = definition.parameters.stored(call.given)
        return values.encode_call(args, kwargs).text()


def _name_of(body: Callable[..., Any]) -> str:
    """Return what a step is called without ``name=``; of a method, with its class."""
    name = str(getattr(body, "__name__", ""))
    if name == "<lambda>":
        name = ""
    if is_in_class(body):
        name = str(body.__qualname__).rpartition("<locals>.")[2]
    return name
