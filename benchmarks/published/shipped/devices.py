"""The devices that profiles are shipped of, and their tables."""

from __future__ import annotations

from shipped.tables import Device, Table

_NEUSIGHT = ("NeuSight", "sitar-lab/NeuSight @ 6945927d", "MIT")
_OPERATORS = ("estimate-train-time", "DebarghaG/estimate-train-time @ 1ac4d5e4", "MIT")
_KERNELS = ("neusight-train/kernels/*.csv",)


def _neusight(folder: str) -> Table:
    name, source, licence = _NEUSIGHT
    files = (*_KERNELS, f"neusight-train/{folder}/*-train-*.csv")
    return Table(name=name, source=source, licence=licence, files=files, mapping="neusight")


def _operators(kind: str, *files: str) -> Table:
    name, source, licence = _OPERATORS
    paths = tuple(f"transformer-operators/{file}" for file in files)
    return Table(name=f"{name}{kind}", source=source, licence=licence, files=paths, mapping="transformer-operators")


def _nccl(name: str, source: str, licence: str, *files: str) -> Table:
    return Table(name=name, source=source, licence=licence, files=files, reader="nccl-tests")


_NO_SWEEP = "collectives: a cluster file states their alpha_s and beta_s_per_byte (--cluster)"

DEVICES = (
    Device(
        name="a100-pcie",
        sheet="a100-pcie-80gb",
        device_name="NVIDIA A100 80GB PCIe",
        kernels=(_neusight("NVIDIA_A100_80GB_PCIe"),),
        borrows={"bf16": ("a100-sxm",)},
        lacks=(_NO_SWEEP,),
    ),
    Device(
        name="a100-sxm",
        sheet="a100-sxm-80gb",
        device_name="NVIDIA A100-SXM4-80GB",
        kernels=(_operators("", "Perlmutter/operator/*.csv"),),
        sweeps=(_operators(" on Perlmutter", "Perlmutter/nccl/*_[12]_4.csv", "Perlmutter/nccl/*_p2p_*_[12]_[12].csv"),),
        ranks_per_node=4,
        ranks=8,
        borrows={"fp32": ("a100-pcie",), "bf16": ("a100-pcie",)},
        lacks=("reduce-scatter and all-to-all; a broadcast goes as an all-reduce",),
    ),
    Device(
        name="b200",
        sheet="b200",
        device_name="NVIDIA B200",
        kernels=(
            Table(
                name="SimuMax",
                source="MooreThreads/SimuMax @ 4dcaae51",
                licence="Apache-2.0",
                files=("simumax-b200/system_b200_bf16.json",),
                mapping="simumax",
            ),
        ),
        borrows={"bf16": ("gh200", "a100-pcie"), "fp32": ("h100-sxm", "a100-pcie")},
        lacks=(_NO_SWEEP,),
    ),
    Device(
        name="gh200",
        sheet="gh200",
        device_name="NVIDIA GH200 120GB",
        kernels=(_operators("", "Vista/operator/*.csv"),),
        sweeps=(_operators(" on Vista", "Vista/nccl/*.csv"),),
        ranks=8,
        borrows={"bf16": ("a100-pcie",), "fp32": ("h100-sxm", "a100-pcie")},
        lacks=("reduce-scatter and all-to-all; a broadcast goes as an all-reduce",),
    ),
    Device(
        name="h100-sxm",
        sheet="h100-sxm",
        device_name="NVIDIA H100 80GB HBM3",
        kernels=(_neusight("NVIDIA_H100_80GB_HBM3"),),
        sweeps=(
            _nccl(
                "nccl-tests-cluster",
                "xxrjun/nccl-tests-cluster @ 455de4f8",
                "Apache-2.0",
                # Of January 2026. Those of pairs of nodes are two months older and left out: their all-to-all has a
                # quarter of the bandwidth between nodes, so that they tell of another state of the cluster.
                "nccl-logs/xxrjun-h100__multi-node__*_N10_G8.log",
                "nccl-logs/xxrjun-h100__single-node__*.log",
            ),
        ),
        ranks_per_node=8,
        ranks=80,
        borrows={"fp32": ("a100-pcie",), "bf16": ("gh200", "a100-pcie")},
        lacks=("a broadcast, which goes as an all-reduce",),
    ),
    Device(
        name="v100",
        sheet="v100-pcie-32gb",
        device_name="Tesla V100-PCIE-32GB",
        kernels=(_neusight("Tesla_V100-PCIE-32GB"),),
        sweeps=(
            _nccl("nccl-tests on ABCI", "aistabci/abci2.0benchmark @ f0aa27f2", "MIT", "abci-v100/nccl_osu/*.nccl"),
        ),
        ranks_per_node=4,
        ranks=32,
        borrows={"fp32": ("a100-pcie",)},
        lacks=("all-gather, reduce-scatter and point to point", "bf16, which the device has no peak in"),
    ),
)
"""Sweeps of V100 are of nodes with NVLink (SXM2), its kernels of the card."""
