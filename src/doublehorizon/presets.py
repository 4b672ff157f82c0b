"""Configs by name; `config.py` says what each is for."""

from doublehorizon.config import PRESETS

dhmbpo = PRESETS["dhmbpo"]
paper = PRESETS["paper"]
light = PRESETS["light"]
quick = PRESETS["quick"]
