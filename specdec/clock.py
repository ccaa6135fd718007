"""Where a round's time goes, by stage, without slowing the round: CUDA events on a GPU, the host clock on a CPU.

clock.start("draft"); ...; clock.mark("verify"); ...; clock.stop()
clock.seconds()      # {"draft": s, "verify": s}, once the device has come that far

The events of a captured round are part of its graph: each replay records them again.
"""

import time

import torch


class StageClock:
    """Times consecutive stages. captured: they are marked while a graph is captured, and read after each replay."""

    def __init__(self, device: torch.device, *, captured: bool = False) -> None:
        self._cuda = device.type == "cuda"
        self._captured = captured
        self._marks: list[tuple[str, float, torch.cuda.Event | None]] = []

    def start(self, stage: str) -> None:
        """Begin with this stage, whatever an interrupted round left behind."""
        self._marks.clear()
        self.mark(stage)

    def mark(self, stage: str) -> None:
        """A new stage begins, and the one before it ends."""
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True, external=self._captured)
            event.record()
        self._marks.append((stage, time.perf_counter(), event))

    def stop(self) -> None:
        """The last stage ends."""
        self.mark("")

    def seconds(self) -> dict[str, float]:
        """Seconds by stage; on a GPU the last mark must have been reached."""
        seconds: dict[str, float] = {}
        for (stage, start, event), (_, end, next_event) in zip(self._marks, self._marks[1:], strict=False):
            spent = end - start
            if event is not None and next_event is not None:
                spent = event.elapsed_time(next_event) / 1e3
            seconds[stage] = seconds.get(stage, 0.0) + spent
        return seconds
