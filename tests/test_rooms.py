"""A file imports only files above it in this list, so that the package can be read from top to bottom."""

import ast
from pathlib import Path

ROOMS = [
    "errors",
    "signals",
    "determinism",
    "durable",
    "config",
    "scaling",
    "records",
    "presets",
    "types",
    "envs.termination",
    "envs.spaces",
    "envs.states",
    "envs.paper",
    "envs.dmc",
    "envs.make",
    "envs.check",
    "envs.catalogue",
    "policy",
    "runs",
    "export",
    "film",
    "seats",
    "data",
    "workers",
    "normalizer",
    "replay",
    "devices",
    "kernels",
    "networks",
    "optimizers",
    "terminator",
    "dynamics",
    "fit",
    "rollouts",
    "values",
    "updates",
    "agent",
    "estimate",
    "trackers",
    "logs",
    "view",
    "progress",
    "agreement",
    "health",
    "learning",
    "evaluations",
    "chunks",
    "checkpoints",
    "saved",
    "folders",
    "train",
    "cache",
    "api",
    "jobs",
    "studies",
    "board",
    "crowd",
    "analysis.aggregate",
    "analysis.curves",
    "analysis.figures",
    "analysis.subject",
    "analysis.gradients",
    "analysis.advice",
    "analysis.critics",
    "analysis.models",
    "analysis.targets",
    "analysis.outcome",
    "analysis.report",
    "analysis.profiling",
    "analysis.speed",
    "analysis.startup",
    "cli.options",
    "cli.running",
    "cli.train",
    "cli.resume",
    "cli.eval",
    "cli.video",
    "cli.plot",
    "cli.report",
    "cli.export",
    "cli.list",
    "cli.compare",
    "cli.experiment",
    "cli.analyze",
    "cli.analyze_critic_error",
    "cli.analyze_model",
    "cli.analyze_targets",
    "cli.advise_horizon",
    "cli.bench",
    "cli.completion",
]
SOURCE = Path(__file__).parents[1] / "src" / "doublehorizon"


def imported(path: Path) -> set[str]:
    """Rooms that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("doublehorizon"):
            home = (node.module or "").removeprefix("doublehorizon").lstrip(".")
            found |= {home} if home in ROOMS else {f"{home}.{alias.name}".lstrip(".") for alias in node.names}
    return found & set(ROOMS)


def test_every_file_has_its_place():
    files = {".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    assert {name for name in files if not name.split(".")[-1].startswith("__")} == set(ROOMS)


def test_files_import_only_what_stands_above_them():
    for place, room in enumerate(ROOMS):
        below = imported(SOURCE / f"{room.replace('.', '/')}.py") - set(ROOMS[:place])
        assert not below, f"{room} imports {below}"


def test_files_and_functions_fit_a_reader():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 350, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"
