"""Charts as SVG: axes, ticks, smoothing and drawing."""
