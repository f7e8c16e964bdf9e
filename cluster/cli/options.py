"""The options of `tandem generate`, `chat` and `eval`: what they are called, and how they become a client's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from ...proto.errors import InvalidArgument
from ...router.client.types import ChatOptions, Options

DEFAULT_TARGET: Final = "127.0.0.1:50051"

Target = Annotated[str, typer.Option(help="HOST:PORT of the service's gRPC door.")]
ApiKey = Annotated[str, typer.Option(envvar="TANDEM_API_KEY", show_default=False, help="Who asks, if it matters.")]
Model = Annotated[str | None, typer.Option(help="One of the names that the service answers under.")]
RequestId = Annotated[str | None, typer.Option(help="Names the request in logs and timelines.")]
Priority = Annotated[int | None, typer.Option(help="Of those that wait the greatest goes first.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds until the request is given up.")]

MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
MinTokens = Annotated[int | None, typer.Option(help="Nothing ends the completion before so many.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
StopTokenIds = Annotated[list[int] | None, typer.Option("--stop-token-id", help="End at this token; also several.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")]
TruncatePrompt = Annotated[bool, typer.Option("--truncate-prompt", help="Keep the end of a prompt that is too long.")]

Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
AnyTemperature = Annotated[float | None, typer.Option(help="0 is greedy, and the default for one completion.")]
TopK = Annotated[int | None, typer.Option(help="Keep the so many likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens at least so many times as likely as the likeliest.")]
TypicalP = Annotated[float | None, typer.Option(help="Keep the most typical tokens up to this probability.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Divide the logits of tokens seen; 1 changes nothing.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Take this from the logits of tokens generated.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same for each time that they were.")]
LogitBias = Annotated[list[str] | None, typer.Option(help="ID=BIAS adds to a token's logit; also several.")]
BadWords = Annotated[list[str] | None, typer.Option("--bad-word", help="A text not to be generated; also several.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same tokens.")]

N = Annotated[int | None, typer.Option("--n", help="Completions.")]
BestOf = Annotated[int | None, typer.Option(help="Completions to generate, of which the n likeliest are shown.")]
BeamWidth = Annotated[int | None, typer.Option(help="Search with so many hypotheses instead of sampling.")]
LengthPenalty = Annotated[float | None, typer.Option(help="Of the beam search; above 1 favours long hypotheses.")]
EarlyStopping = Annotated[bool, typer.Option("--early-stopping", help="End the beam search at the first so many.")]

Logprobs = Annotated[int | None, typer.Option(help="Show log probabilities, with so many alternatives each.")]
PromptLogprobs = Annotated[int | None, typer.Option(help="The same for the prompt; --max-tokens may then be 0.")]
Echo = Annotated[bool, typer.Option("--echo", help="Repeat the prompt before the completion.")]

JsonSchema = Annotated[str | None, typer.Option(help="JSON of this schema; @FILE reads it.")]
JsonObject = Annotated[bool, typer.Option("--json-object", help="A JSON object.")]
Regex = Annotated[str | None, typer.Option(help="A text that this expression matches.")]
Choice = Annotated[list[str] | None, typer.Option(help="One of the texts given so.")]
Grammar = Annotated[str | None, typer.Option(help="A text of this Lark grammar; @FILE reads it.")]

ShowTimeline = Annotated[bool, typer.Option("--timeline", help="Tell on stderr where the time went.")]


def given_options(params: Mapping[str, Any]) -> Options:
    """What a command was given, by the names of a client's options; flags that are not set are left out.

    Raises InvalidArgument for a logit bias that is none and a file that cannot be read."""
    names = ChatOptions.__annotations__
    options = {name: value for name, value in params.items() if name in names and _is_given(value)}
    if "logit_bias" in options:
        options["logit_bias"] = dict(map(_bias, options["logit_bias"]))
    for name in ("json_schema", "grammar"):
        if name in options:
            options[name] = _text_of(name, options[name])
    return cast(Options, options)


def _is_given(value: object) -> bool:
    return not (value is None or value is False or value == [] or value == ())


def _bias(given: str) -> tuple[int, float]:
    token_id, _, bias = given.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise InvalidArgument(f"{given!r} is not ID=BIAS, such as 17=-100", "logit_bias") from None


def _text_of(name: str, given: str) -> str:
    if not given.startswith("@"):
        return given
    return read_text(Path(given[1:]), name)


def read_text(path: Path, name: str) -> str:
    """The text of a file that the option `name` names. Raises InvalidArgument."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", name) from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path}: not UTF-8", name) from None
