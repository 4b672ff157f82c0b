"""Configs by name: `dh.presets.dhmbpo` is the paper's, `dh.presets.quick` suits a CPU and a small task."""

from doublehorizon.config import PRESETS

dhmbpo = PRESETS["dhmbpo"]
quick = PRESETS["quick"]
