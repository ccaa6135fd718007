"""Recorded figures: rows of the README's GPU table, and the picture next to it, `docs/decode_speed.svg`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "decode_speed.svg"
CASE = "readme"
"""The case that measures them again."""
PEER = "vLLM 0.26.0"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a plain step and of a round of 4 drafts, ours and the peer's."""

    plain: float
    drafts: float
    peer_plain: float
    peer_drafts: float


E4B = {
    1: StepTimes(3.27, 3.78, 4.51, 5.48),
    8: StepTimes(3.61, 4.70, 4.73, 6.12),
    32: StepTimes(4.12, 6.58, 5.38, 8.07),
}
"""Gemma 4 E4B and its assistant by requests at a time: one H200, random bf16 weights, context 1,024. Ours are
those of docs/results/2026-11-22-rounds.md; the peer's are from a later run on the same kind of GPU, a faster one."""


def readme_rows(figures: Mapping[int, StepTimes] = E4B) -> Iterator[str]:
    """Rows of the README's table: pair, prompts, acceptance length, plain, with drafts, peer, command."""
    for number, (batch, ms) in enumerate(figures.items()):
        first = number == 0
        name = "shape of Gemma 4 E4B and its assistant, H200" if first else "the same"
        units = (" a step", " a round") if first else ("", "")
        prompts = f"random weights, {batch}" if first else str(batch)
        peer = f"{PEER if first else PEER.split()[0]} {ms.peer_plain:.2f} / {ms.peer_drafts:.2f}"
        cells = [name, prompts, "", f"{ms.plain:.2f} ms{units[0]}", f"{ms.drafts:.2f} ms{units[1]}", peer]
        cells.append(f"`python -m bench {CASE}`" if first else "the same run")
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |")


COLOURS = {"plain": "#9aa5b1", "with drafts": "#2f6f4f"}
WIDTH, LEFT, BAR, GAP, SCALE = 720, 190, 16, 14, 52.0
"""Pixels: of the picture, before the bars, of a bar's height, between groups; of a millisecond."""


def decode_speed_svg() -> str:
    """Horizontal bars, shorter is faster: a plain step and a round of 4 drafts, ours above the peer's."""
    shapes: list[str] = []
    y = 64

    def text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> None:
        shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>')

    def box(x: float, y: float, width: float, height: float, colour: str) -> None:
        shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}"/>')

    text(12, 24, "Milliseconds of a decode step, Gemma 4 E4B, one H200 (shorter is faster)", weight="bold")
    for number, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + 170 * number
        box(x, 38, 12, 12, colour)
        text(x + 18, 48, "plain step" if name == "plain" else "round of 4 drafts, up to 5 tokens")
    for batch, ms in E4B.items():
        text(12, y + BAR * 2 + 5, f"{batch} request{'s' if batch > 1 else ''}", weight="bold")
        for whose, times in (("specdec", (ms.plain, ms.drafts)), (PEER, (ms.peer_plain, ms.peer_drafts))):
            text(LEFT - 8, y + BAR + 4, whose, anchor="end")
            for time, colour in zip(times, COLOURS.values(), strict=True):
                box(LEFT, y, time * SCALE, BAR - 2, colour)
                text(LEFT + time * SCALE + 6, y + BAR - 5, f"{time:.2f}")
                y += BAR
        y += GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    style = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#1f2933"'
    return "\n".join(
        [f"{head} {style}>", f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>', *shapes, "</svg>", ""]
    )
