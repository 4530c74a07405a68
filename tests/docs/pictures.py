"""Makes the pictures of docs/console.md from those that `make test-browser` took: `python -m tests.docs.pictures`.

A picture is the parts that a test took of a page (`tests.browser.conftest.picture`), one below the other, in 256
colours: text and lines stay sharp, and a picture has about 100 KB at most. It needs Pillow.
"""

import sys
from pathlib import Path

from PIL import Image

from tests.browser.conftest import PICTURES

OUT = Path(__file__).parents[2] / "docs/pictures"
_MARGIN, _COLOURS = 16, 256


def joined(parts: list[Path]) -> Image.Image:
    """The parts below each other on white."""
    images = [Image.open(one).convert("RGB") for one in parts]
    whole = Image.new("RGB", (max(one.width for one in images) + 2 * _MARGIN,
                              sum(one.height + _MARGIN for one in images) + _MARGIN), "white")
    top = _MARGIN
    for one in images:
        whole.paste(one, (_MARGIN, top))
        top += one.height + _MARGIN
    return whole


def main() -> int:
    """Write every picture that the tests have taken."""
    names = sorted({one.stem.rpartition("-")[0] for one in PICTURES.glob("*-*.png")})
    if not names:
        print(f"error: {PICTURES} has no pictures\nhint: make test-browser takes them", file=sys.stderr)
        return 1
    OUT.mkdir(exist_ok=True)
    for name in names:
        out = OUT / f"{name}.png"
        whole = joined(sorted(PICTURES.glob(f"{name}-[0-9].png")))
        whole.quantize(_COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)
        print(f"{out.relative_to(OUT.parents[1])}: {out.stat().st_size / 1e3:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
