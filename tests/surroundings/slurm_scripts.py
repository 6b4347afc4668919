"""Scripts of fixed requests, as the generator writes them: those under slurm/ and the golden ones.

``python tests/surroundings/slurm_scripts.py`` writes them anew, for a look at what changed.
"""

from __future__ import annotations

from pathlib import Path

from paradl_bench.slurm.chain import chain_of
from paradl_bench.slurm.estimate import Estimate
from paradl_bench.slurm.jobs.request import CalibrationRequest
from paradl_bench.slurm.jobs.script import Folders, script_of
from paradl_bench.slurm.jobs.site import read_site

ROOT = Path(__file__).parents[2]
EXAMPLES, GOLDEN = ROOT / "slurm", ROOT / "tests/slurm/golden"


def request(models: str, nodes: tuple[int, ...], strategies: str, batch: int) -> CalibrationRequest:
    return CalibrationRequest(
        models=tuple(models.split(",")),
        nodes=nodes,
        strategies=tuple(strategies.split(",")),
        batch=batch,
        operations="all_reduce,broadcast,all_gather,reduce_scatter,send_recv",
        sizes="1K:256M:4",
    )


CASES = {
    EXAMPLES / "cpu": ("site-cpu", request("resnet50", (1, 2), "serial,data", 8)),
    EXAMPLES / "gpu": ("site-gpu", request("resnet50,vgg16", (1, 2, 4), "serial,data,filter", 32)),
    GOLDEN / "container": ("site-container", request("resnet50", (1, 2), "serial,data", 32)),
    GOLDEN / "shares": ("site-cpu", request("vgg16", (2,), "serial,d2f2,s16,p2", 4)),
}
"""By folder: the example site file and what is asked for."""


def scripts(folder: Path) -> dict[str, str]:
    """File names and texts of a case."""
    name, asked = CASES[folder]
    site = read_site(EXAMPLES / f"{name}.yaml")
    folders = Folders(output=Path("/scratch/my_project/calibration"), work=Path("/home/me/models"))
    jobs = chain_of(Estimate(request=asked, site=site, works=None))
    return {f"{job.name}.sbatch": script_of(job, site, folders) for job in jobs}


if __name__ == "__main__":
    for folder in CASES:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in scripts(folder).items():
            (folder / name).write_text(text)
