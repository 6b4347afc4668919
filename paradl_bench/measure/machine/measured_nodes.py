"""What ``doctor`` finds on the nodes of a measurement, kept beside what was measured on them (``nodes.json``).

Ranks look where they are already, so that no job has to start anything for it. Of a lone host the manifest tells
enough; only Slurm gives another one each time. Nodes that are emulated are one host.
"""

from __future__ import annotations

import os

from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.measure.machine.node_doctor import node_of_findings, nodes_of_job
from paradl_bench.measure.machine.node_findings import NODES_NAME
from paradl_bench.measure.machine.rank_hosts import HostNotes
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.ranks.emulated_nodes.cluster import nodes_of_rank
from paradl_bench.ranks.environment import host_cores
from paradl_bench.ranks.groups.process_groups import RankContext


def note_places(context: RankContext, directory: MeasurementDirectory | None) -> HostNotes:
    """Note every rank's host and clock, and what its nodes have; a collective. Rank 0 alone has a directory.

    An attempt that goes on elsewhere replaces what the one before has noted of its nodes. Raises WorkError where that
    can't be written.
    """
    noted = HostNotes(context, directory)
    # Rank 0's word: what one rank takes part in, all have to.
    wanted = context.share(len(noted.speaking) > 1 or "SLURM_JOB_ID" in os.environ, bool)
    if wanted and nodes_of_rank() is None:
        # This rank is pinned to a core by now; so many were there before.
        findings = node_of_findings(cores=host_cores()) if context.rank in noted.speaking else ()
        job = nodes_of_job(context, noted.places, findings)
        if directory is not None:
            write_bytes_atomically(directory.path / NODES_NAME, encode_pretty(job))
    return noted
