"""Two runs on a Ray cluster of two nodes, one of which is taken away in the middle: in a process of its own, as Ray
forks and JAX has threads.

    python tests/cluster.py FOLDER
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from doublehorizon.config_json import changed
from doublehorizon.experiments.experiment_view import ExperimentView
from doublehorizon.experiments.launchers import Resources, run_on_ray
from doublehorizon.experiments.paper_experiments import EXPERIMENTS, jobs_of
from worlds import TINY

CONFIG = changed(TINY, {"loop.checkpoint_every": 1})
JOBS = jobs_of(EXPERIMENTS["ablation"], CONFIG, ("Pendulum-v1",), steps=400, seeds=1, device="cpu")[:2]
JOBS = [replace(one, config=changed(one.config, {"loop.steps_per_iteration": 20})) for one in JOBS]


def main(folder: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)]
    ray.init(address=cluster.address, log_to_driver=False)
    losses = []

    class Impatient(ExperimentView):
        """Takes a node away once both runs have learnt something."""

        def refresh(self) -> None:
            super().refresh()
            if not losses and all(row.step >= 60 for row in self.rows.values()):
                losses.append({name: row.step for name, row in self.rows.items()})
                cluster.remove_node(nodes[0], allow_graceful=False)

    try:
        with Impatient(JOBS, folder, quiet=True) as view:
            problems = run_on_ray(JOBS, folder, view, None, Resources(gpus=0.0, cores=1.0))
    finally:
        ray.shutdown()
        cluster.shutdown()
    states = {name: row.state for name, row in view.rows.items()}
    print(json.dumps({"problems": problems, "losses": losses, "states": states}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
