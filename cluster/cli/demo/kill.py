"""Runs mixed streams twice: undisturbed, and while processes of the service are killed.

Each stream of the second run must equal the stream of the first one. Knows nothing of Ray: the
processes are found from outside, as an operator would find them.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ....proto.errors import Unavailable
from .differences import count_differing_tokens, first_difference
from .followed_stream import FollowedStream, Pause, wait_until
from .mixed_requests import MixedRequest
from .processes import CONTROLLER, PlacedRequest, ServiceProcesses
from .screen import Screen, milliseconds

KINDS: Final = ("decode", "prefill", "router", "controller")
"""The processes that are killed, in this order."""

_TITLES: Final = {
    "decode": "decode worker",
    "prefill": "prefill worker",
    "router": "router",
    "controller": CONTROLLER,
}
_WAIT_SECONDS: Final = 60.0  # far above the longest gap, so that only a hang exceeds it
_IDLE_SECONDS: Final = 10.0
_MAX_TRIES: Final = 5  # to kill a process before all streams have ended
# Between two questions to each router. A router answers ten in a second; without its answer, its
# streams would seem to be nowhere.
_ASK_SECONDS: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class KillReport:
    """Holds the results of two runs of the same requests."""

    undisturbed: Mapping[str, FollowedStream]  # by the name of the request
    disturbed: Sequence[FollowedStream]
    num_held_blocks: int  # by workers after the end of all streams
    seconds: float  # of both runs

    @property
    def lost(self) -> list[str]:
        """Returns a line for each stream that has not reached its end, in either run."""
        streams = [*self.undisturbed.values(), *self.disturbed]
        return [f"{each.request.name}: {each.error}" for each in streams if each.error]

    @property
    def altered(self) -> list[str]:
        """Returns a line for each stream that ended, but not as in the undisturbed run."""
        lines = []
        for each in self.disturbed:
            expected = self.undisturbed[each.request.name]
            if not (each.error or expected.error):
                difference = first_difference(each.choices, expected.choices)
                lines += [f"{each.request.name}: {difference}"] if difference else []
        return lines

    @property
    def num_differing_tokens(self) -> int:
        """Returns the number of tokens that differ from the undisturbed run, lost ones included."""
        return sum(
            count_differing_tokens(each.choices, self.undisturbed[each.request.name].choices)
            for each in self.disturbed
        )

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for each in self.disturbed for choice in each.choices)

    @property
    def gaps(self) -> dict[str, list[float]]:
        """Returns the gaps in seconds of the streams that were cut, by the kind that was killed."""
        return {
            kind: [
                each.pauses[kind].seconds
                for each in self.disturbed
                if kind in each.pauses and each.pauses[kind].is_cut
            ]
            for kind in KINDS
        }

    @property
    def passed(self) -> bool:
        return not (self.lost or self.altered or self.num_differing_tokens or self.num_held_blocks)

    def lines(self) -> list[str]:
        """Returns the lines of the report."""
        gaps = {kind: gap for kind, gap in self.gaps.items() if gap}
        longest = [f"{kind} {milliseconds(max(gap))} ms" for kind, gap in gaps.items()]
        overall = max((each.longest_gap for each in self.disturbed), default=0.0)
        before = max((each.longest_gap for each in self.undisturbed.values()), default=0.0)
        cut = ", ".join(f"{_TITLES[kind]} {len(gap)}" for kind, gap in self.gaps.items())
        return [
            f"streams: {len(self.disturbed)}, tokens: {self.num_tokens}, "
            f"both runs: {self.seconds:.1f} s",
            f"streams cut by the kill of: {cut}",
            f"longest gap when cut: {', '.join(longest) or 'no stream was cut'}",
            f"longest gap of any stream: {milliseconds(overall)} ms; in the undisturbed run: "
            f"{milliseconds(before)} ms",
            *(f"LOST {line}" for line in self.lost),
            *(f"ALTERED {line}" for line in self.altered),
            f"streams lost: {len(self.lost)}",
            f"streams altered: {len(self.altered)}",
            f"KV blocks that workers still hold: {self.num_held_blocks}",
            f"tokens that differ from an undisturbed run: {self.num_differing_tokens}",
        ]


class KillDemo:
    """Runs the requests at one service, and kills its processes in the second run."""

    def __init__(
        self,
        routers: Sequence[tuple[str, str]],
        requests: Sequence[MixedRequest],
        screen: Screen,
    ) -> None:
        """Takes the addresses of the gRPC and the HTTP server of each router."""
        self._processes = ServiceProcesses(routers)
        self._addresses = [grpc for grpc, _ in routers]
        self._requests = requests
        self._screen = screen
        self._changed = asyncio.Event()
        self._streams: list[FollowedStream] = []  # the last one of each request
        self._readers: list[asyncio.Task[None]] = []

    async def run(self) -> KillReport:
        """Runs the requests undisturbed, then while processes are killed; compares the runs.

        Raises Unavailable if a stream stands still.
        """
        started = time.monotonic()
        undisturbed = await self._play("undisturbed run, for comparison", ())
        disturbed = await self._play("the same requests; processes are killed now", KINDS)
        return KillReport(
            undisturbed={each.request.name: each for each in undisturbed},
            disturbed=disturbed,
            num_held_blocks=await self._held_blocks(),
            seconds=time.monotonic() - started,
        )

    async def _play(self, title: str, kinds: Sequence[str]) -> list[FollowedStream]:
        """Runs the requests, and meanwhile kills a process of each kind, one after the other.

        Returns all streams. If they end before the last kill, the requests are sent again.
        """
        ended: list[FollowedStream] = []
        self._streams.clear()
        with self._screen.showing(title, self._streams, kinds):
            try:
                await self._begin()
                for kind in kinds:
                    ended += await self._strike_running(kind)
                self._start(lambda each: each.starts_late)
                await asyncio.gather(*self._readers)
            finally:
                for reader in self._readers:
                    reader.cancel()
                await asyncio.gather(*self._readers, return_exceptions=True)
                self._readers.clear()
            self._screen.event("all streams have ended")
        return [*ended, *self._streams]

    async def _begin(self) -> None:
        """Makes a stream for each request, and starts those that do not start late.

        Returns when each of these has tokens, so that processes work for it.
        """
        self._streams[:] = [FollowedStream(each, self._notice) for each in self._requests]
        self._start(lambda each: not each.starts_late)
        await self._wait(lambda: all(map(_has_begun, self._streams)))

    def _start(self, is_chosen: Callable[[MixedRequest], bool]) -> None:
        """Starts the streams of the chosen requests that wait."""
        for stream in self._streams:
            if stream.state == "waiting" and is_chosen(stream.request):
                stream.state = "running"
                self._readers.append(asyncio.create_task(stream.read(self._addresses)))

    def _running(self) -> dict[str, FollowedStream]:
        return {each.request.name: each for each in self._streams if each.state == "running"}

    async def _strike_running(self, kind: str) -> list[FollowedStream]:
        """Kills a process of a kind while streams run; returns the streams that ended before.

        Sends the requests again if all streams have ended. Raises Unavailable if they always do.
        """
        ended: list[FollowedStream] = []
        for _ in range(_MAX_TRIES):
            if kind == "prefill":
                self._start(lambda each: each.starts_late)
            if await self._strike(kind):
                return ended
            ended += self._streams
            await self._begin()
        raise Unavailable(f"all streams end before a {_TITLES[kind]} is killed; give more --tokens")

    async def _strike(self, kind: str) -> bool:
        """Kills a process of a kind; returns True when every stream has gone on for some tokens.

        Kills none and returns False if all streams have ended.
        """
        placed = await self._placed(kind)
        running = self._running()
        if not running:
            return False
        target, cut = choose_target(kind, placed)
        for stream in running.values():
            stream.begin_pause(kind, is_cut=stream.request.name in cut)
        pid = self._processes.kill(target)
        self._screen.event(
            f"kill -9 {pid}: {_TITLES[kind]}; streams cut: {len(cut & running.keys())} of "
            f"{len(running)}",
            "bold red",
        )
        pauses = {name: each.pauses[kind] for name, each in running.items()}
        await self._leave(kind, target, pauses)
        await self._wait(lambda: all(each.is_over for each in pauses.values()))
        longest = max((each.seconds for each in pauses.values()), default=0.0)
        self._screen.event(f"every stream goes on; longest gap {milliseconds(longest)} ms")
        for name, pause in pauses.items():
            if pause.is_cut:
                self._screen.line(f"{name} was cut for {milliseconds(pause.seconds)} ms")
        return True

    async def _placed(self, kind: str) -> list[PlacedRequest]:
        """Returns the running requests once a process of the kind works for one of them.

        For a prefill worker, this is while it computes a prompt, or later if that was too short.
        Returns none once all streams have ended.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            placed = await asyncio.to_thread(self._processes.placed_requests)
            if not self._running():
                return []
            is_found = kind == "controller" or any(getattr(each, kind) for each in placed)
            if kind == "prefill":
                late = [each for each in self._streams if each.request.starts_late]
                computes_prompt = any(each.is_prefilling and each.prefill for each in placed)
                is_found &= computes_prompt or any(map(_has_begun, late))
            if is_found:
                return placed
            if time.monotonic() > deadline:
                raise Unavailable(f"no {_TITLES[kind]} has a request after {_WAIT_SECONDS:g} s")
            await asyncio.sleep(_ASK_SECONDS)

    async def _leave(self, kind: str, target: str, pauses: Mapping[str, Pause]) -> None:
        """Waits until no running request is at the killed process.

        A second kill before that could find a request in its solo run, which both kills would then
        be blamed on.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            placed = await asyncio.to_thread(self._processes.placed_requests)
            found = {each.name for each in placed if not _is_at(kind, target, each)}
            if all(pause.is_over or name in found for name, pause in pauses.items()):
                break
            if time.monotonic() > deadline:
                raise Unavailable(f"streams are still at the {_TITLES[kind]} that was killed")
            await asyncio.sleep(_ASK_SECONDS)
        for pause in pauses.values():
            pause.is_elsewhere = True

    async def _wait(self, condition: Callable[[], bool]) -> None:
        if not await wait_until(condition, self._changed, _WAIT_SECONDS):
            raise Unavailable(f"a stream has stood still for {_WAIT_SECONDS:g} s")

    async def _held_blocks(self) -> int:
        """Returns the blocks that workers hold for requests, 0 as soon as they hold none."""
        deadline = time.monotonic() + _IDLE_SECONDS
        while True:
            num_held = await asyncio.to_thread(self._processes.num_held_blocks)
            if not num_held or time.monotonic() > deadline:
                return num_held
            await asyncio.sleep(_ASK_SECONDS)

    def _notice(self, stream: FollowedStream) -> None:
        self._changed.set()
        if stream.state in ("complete", "lost"):
            self._screen.line(f"{stream.request.name}: {stream.state}, {stream.num_tokens} tokens")


def _has_begun(stream: FollowedStream) -> bool:
    """Returns True if the stream has tokens, has ended, or starts later."""
    return stream.num_tokens > 0 or stream.state != "running"


def choose_target(kind: str, placed: Sequence[PlacedRequest]) -> tuple[str, set[str]]:
    """Returns the process with the most requests of a kind, and the names of these requests.

    Raises Unavailable if no process of the kind has a request.
    """
    if kind == "controller":
        return CONTROLLER, set()  # it works for no stream
    placed = [each for each in placed if getattr(each, kind)]
    affected = [each for each in placed if _is_at(kind, getattr(each, kind), each)]
    counts = Counter(str(getattr(each, kind)) for each in affected or placed)
    if not counts:
        raise Unavailable(f"no {_TITLES[kind]} has a request; give more --tokens")
    target = counts.most_common(1)[0][0]
    return target, {each.name for each in placed if _is_at(kind, target, each)}


def _is_at(kind: str, target: str, request: PlacedRequest) -> bool:
    """Returns True if the process works for the request; a prefill worker until the first token."""
    is_at: bool = kind != "controller" and getattr(request, kind) == target
    return is_at and (kind != "prefill" or request.is_prefilling)
