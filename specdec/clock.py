"""Where a round's time goes, by stage, without slowing the round: CUDA events on a GPU, the host clock on a CPU.

clock.start("draft"); ...; clock.mark("verify"); ...; seconds = clock.stop()      # {"draft": s, "verify": s}
"""

import time

import torch


class StageClock:
    """Times consecutive stages; `stop` comes after the round's device-to-host copy, so that it waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, float, torch.cuda.Event | None]] = []

    def start(self, stage: str) -> None:
        """Begin with this stage, whatever an interrupted round left behind."""
        self._marks.clear()
        self.mark(stage)

    def mark(self, stage: str) -> None:
        """A new stage begins, and the one before it ends."""
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append((stage, time.perf_counter(), event))

    def stop(self) -> dict[str, float]:
        """Seconds by stage since the first mark; the clock is empty again."""
        self.mark("")
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        seconds: dict[str, float] = {}
        for (stage, start, event), (_, end, next_event) in zip(self._marks, self._marks[1:], strict=False):
            spent = end - start
            if event is not None and next_event is not None:
                spent = event.elapsed_time(next_event) / 1e3
            seconds[stage] = seconds.get(stage, 0.0) + spent
        self._marks.clear()
        return seconds
