"""Draw the pictures in examples/images: python examples/make_images.py [FOLDER]

Made up with Pillow and numpy, so that trying encodepool needs no download: flat shapes, a smooth
scene, a page of text, and a fractal; square, wide and tall.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

OVERSAMPLE = 3
"""Drawn larger and scaled down, for smooth edges."""


def shapes() -> Image.Image:
    """Paper with a few plain shapes, 448 x 448."""
    side = 448 * OVERSAMPLE
    picture = Image.new("RGB", (side, side), "#f4efe6")
    draw = ImageDraw.Draw(picture)

    def scaled(*points: float) -> list[float]:
        return [value * OVERSAMPLE for value in points]

    draw.ellipse(scaled(40, 50, 220, 230), fill="#d1495b")
    draw.rounded_rectangle(scaled(250, 70, 410, 230), radius=18 * OVERSAMPLE, fill="#00798c")
    draw.polygon(scaled(130, 270, 230, 410, 30, 410), fill="#edae49")
    draw.ellipse(scaled(265, 275, 405, 415), outline="#30638e", width=16 * OVERSAMPLE)
    draw.line(scaled(215, 250, 275, 290), fill="#2b2d42", width=6 * OVERSAMPLE)
    return picture.resize((448, 448), Image.Resampling.LANCZOS)


def harbour() -> Image.Image:
    """A sun over water with a boat, 640 x 384."""
    width, height, horizon = 640 * OVERSAMPLE, 384 * OVERSAMPLE, 236 * OVERSAMPLE
    top, low, water = np.array([38, 45, 92.0]), np.array([255, 173, 110.0]), np.array([24, 44, 78.0])
    down = np.linspace(0, 1, height)[:, None]
    sky = top + (low - top) * np.clip(down * height / horizon, 0, 1) ** 1.4
    sea = (
        low * 0.75
        + (water - low * 0.75) * np.clip((down * height - horizon) / (height - horizon), 0, 1) ** 0.6
    )
    rows = np.where(down * height < horizon, sky, sea)
    picture = Image.fromarray(np.repeat(rows[:, None, :], width, axis=1).astype(np.uint8))
    glow = Image.new("L", (width, height), 0)
    sun = [430 * OVERSAMPLE, 150 * OVERSAMPLE, 530 * OVERSAMPLE, 250 * OVERSAMPLE]
    ImageDraw.Draw(glow).ellipse(sun, fill=255)
    glow = glow.filter(ImageFilter.GaussianBlur(22 * OVERSAMPLE))
    picture.paste(Image.new("RGB", (width, height), "#ffd9a0"), mask=glow.point(lambda value: value * 0.8))
    draw = ImageDraw.Draw(picture)
    draw.pieslice(sun, 180, 360, fill="#fff1c9")
    draw.rectangle([0, horizon, width, horizon + OVERSAMPLE], fill="#e9b48a")
    for step in range(9):
        y, half = horizon + (8 + step * 15) * OVERSAMPLE, (52 - step * 4) * OVERSAMPLE
        middle = 480 * OVERSAMPLE + (-1) ** step * 5 * OVERSAMPLE
        draw.rounded_rectangle(
            [middle - half, y, middle + half, y + 4 * OVERSAMPLE], radius=2 * OVERSAMPLE, fill="#f6c48e"
        )

    def scaled(*points: float) -> list[float]:
        return [value * OVERSAMPLE for value in points]

    draw.polygon(scaled(90, 262, 290, 262, 262, 300, 122, 300), fill="#1b1f33")
    draw.line(scaled(190, 262, 190, 90), fill="#1b1f33", width=5 * OVERSAMPLE)
    draw.polygon(scaled(198, 98, 198, 250, 282, 250), fill="#e8e3d8")
    draw.polygon(scaled(182, 120, 182, 250, 112, 250), fill="#b9c0cf")
    return picture.resize((640, 384), Image.Resampling.LANCZOS)


def page() -> Image.Image:
    """A printed page with a small chart, 384 x 512."""
    picture = Image.new("RGB", (384, 512), "#fffdf8")
    draw = ImageDraw.Draw(picture)
    draw.text((32, 28), "Encode workers", font=ImageFont.load_default(30), fill="#222222")
    draw.line([32, 72, 352, 72], fill="#b23a48", width=3)
    body = ImageFont.load_default(14)
    text = [
        "A vision tower turns an image into",
        "rows, one for each square of pixels.",
        "The language model reads them as if",
        "they were words.",
        "",
        "Here the towers run in a pool of their",
        "own, and the rows travel to memory",
        "that a prefill worker has set aside.",
    ]
    for index, line in enumerate(text):
        draw.text((32, 92 + index * 21), line, font=body, fill="#333333")
    draw.line([48, 470, 352, 470], fill="#222222", width=2)
    draw.line([48, 290, 48, 470], fill="#222222", width=2)
    for index, tall in enumerate((42, 70, 64, 105, 128, 160)):
        left = 64 + index * 47
        draw.rectangle([left, 468 - tall, left + 30, 468], fill="#457b9d" if index < 5 else "#b23a48")
    draw.text((52, 476), "rows a second, by week", font=body, fill="#555555")
    return picture


def fractal() -> Image.Image:
    """The border of the Mandelbrot set, 512 x 320."""
    width, height = 512, 320
    real = np.linspace(-0.7608, -0.7328, width)[None, :]
    imaginary = np.linspace(0.0966, 0.1141, height)[:, None]
    point = real + 1j * imaginary
    value = np.zeros_like(point)
    escaped = np.full(point.shape, np.nan)
    for step in range(220):
        inside = np.isnan(escaped)
        value[inside] = value[inside] ** 2 + point[inside]
        gone = inside & (np.abs(value) > 8)
        escaped[gone] = step + 1 - np.log2(np.log(np.abs(value[gone])))
    shade = np.sqrt(np.nan_to_num((escaped - 20) / 200).clip(0, 1))
    knots = np.array([0, 0.25, 0.5, 0.75, 1])
    colours = np.array([[10, 16, 44], [28, 84, 130], [230, 225, 200], [228, 138, 46], [90, 20, 30]])
    rgb = np.stack([np.interp(shade, knots, colours[:, c]) for c in range(3)], axis=-1)
    rgb[np.isnan(escaped)] = (8, 8, 16)
    picture = Image.fromarray(rgb.astype(np.uint8))
    return picture.quantize(64, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).convert("RGB")


PICTURES = {"shapes": shapes, "harbour": harbour, "page": page, "fractal": fractal}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PICTURES.items():
        make().save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
